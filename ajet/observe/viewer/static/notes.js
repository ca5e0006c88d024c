// A note and tags, shown and edited where it belongs.
import { apiOf, appendText, clock, el, fetchJson, textBlock, toast } from "./common.js";

export const tagNode = (tag) => appendText(el("span", { class: "tag note-tag" }), tag);

/** Keep a note. Only pages of this server may: the body is JSON, which no form of another site can send. */
async function keep(name, written) {
  return fetchJson(`${apiOf(name)}/notes`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(written) });
}

/** Fill `holder` with the note about an episode, or about the run. */
export async function showNote(holder, name, episode = "") {
  let all;
  try { all = await fetchJson(`${apiOf(name)}/notes`); } catch (error) { holder.replaceChildren(appendText(el("p", { class: "bad wrap" }), error.message)); return; }
  holder.hidden = Boolean(all.refused);
  const what = episode ? "episode" : "run";
  let kept = (episode ? all.episodes[episode] : all.run) || { note: "", tags: [], edited: 0 };
  const read = () => {
    const something = kept.note || kept.tags.length;
    const edit = el("button", { class: "more", type: "button", on: { click: write } }, something ? "Edit" : "Add a note or tags");
    holder.replaceChildren(
      el("div", { class: "row" }, el("h2", {}, "Note"), ...kept.tags.map(tagNode), el("span", { class: "spring" }), kept.edited && something ? el("span", { class: "muted small" }, clock(kept.edited)) : null, edit),
      ...(kept.note ? [textBlock(kept.note)] : []));
  };
  const write = () => {
    const note = el("textarea", { rows: "4", maxlength: "20000", "aria-label": `Note about this ${what}`, placeholder: `What to remember about this ${what}` });
    const tags = el("input", { "aria-label": "Tags, separated by commas", placeholder: "Tags, separated by commas", autocomplete: "off" });
    note.value = kept.note; tags.value = kept.tags.join(", ");
    const wrong = el("p", { class: "bad wrap", role: "alert", hidden: true });
    const form = el("form", { class: "note-form" }, note, tags, wrong, el("div", { class: "row" }, el("button", { class: "button primary" }, "Keep"), el("button", { class: "button", type: "button", on: { click: read } }, "Cancel")));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      try {
        kept = await keep(name, { episode, note: note.value, tags: tags.value.split(",") });
        read();
        toast("Note kept");
      } catch (error) { wrong.hidden = false; wrong.textContent = error.message; }
    });
    holder.replaceChildren(el("div", { class: "row" }, el("h2", {}, "Note")), form);
    note.focus();
  };
  read();
}
