// Times in the reader's own form, and the note about the run.
import { $, clock, experiment } from "./common.js";
import { showNote } from "./notes.js";

for (const time of document.querySelectorAll("time[data-time]")) time.textContent = clock(Number(time.dataset.time));
showNote($("note"), experiment());
