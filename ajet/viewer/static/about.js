// Times in the reader's own form.
import { clock } from "./common.js";

for (const time of document.querySelectorAll("time[data-time]")) time.textContent = clock(Number(time.dataset.time));
