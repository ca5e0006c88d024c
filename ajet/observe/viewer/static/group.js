// The episodes of a group side by side: what they have in common, and what their rewards reward.
import { $, agentColours, apiOf, appendText, counted, el, experiment, fetchJson, mean, number, pageOf, pill, rewardClass, short, showQuery, signClass, signed } from "./common.js";
import { conversation, mainOf, messageNode, rawSwitch, score } from "./chat.js";

const name = experiment();

function column(row, view, colourOf) {
  const calls = view.calls;
  const leaf = mainOf(calls);
  const chat = el("div", { class: "chat", tabindex: "0", "aria-label": `Conversation of episode ${row.repeat}` });
  if (view.episode.failure) chat.append(el("div", { class: "failure" }, el("b", {}, view.episode.failure.kind), el("div", { class: "wrap" }, view.episode.failure.message)));
  if (leaf >= 0) chat.append(...conversation(calls, leaf).filter(({ message }) => message.role !== "system").map((part) => messageNode(part, colourOf, { compact: true })));
  return el("article", { class: "card column" },
    el("header", {}, el("div", { class: "row" }, el("a", { class: "name", href: pageOf(name, "episode", row.episode_id) }, `Episode ${row.repeat}`), el("span", { class: "spring" }), pill(row.status)),
      el("div", { class: "scores" }, score("reward", short(row.reward), rewardClass(row.reward)), score("advantage", signed(row.advantage), signClass(row.advantage)), score("turns", number(row.turns)), score("sampled", number(row.sampled)))),
    chat);
}

const { rows, total, episodes } = await fetchJson(`${apiOf(name)}/group/${encodeURIComponent($("group").dataset.group)}`);
if (!rows.length) $("about-group").textContent = "No episodes of this group are recorded.";
else {
  const rewards = rows.map((row) => row.reward).filter((reward) => reward !== null);
  const middle = mean(rewards), spread = Math.sqrt(mean(rewards.map((reward) => (reward - middle) ** 2)));
  showQuery(episodes[0].query || rows[0].preview || rows[0].task_id);
  $("about-group").replaceChildren(appendText(el("a", { href: pageOf(name, "task", rows[0].task_id) }), rows[0].task_id), `${episodes[0].has_tokens ? ` · step ${rows[0].step}` : ""} · ${counted(total, "episode")} · ${rewards.length ? `reward ${short(middle)} ± ${short(spread)}` : "all failed"}${spread === 0 && rewards.length > 1 && !rows[0].validation && episodes[0].has_tokens ? " · all equal: this group teaches nothing" : ""}`);
  if (rows.length > 1) {
    $("differences").href = `${pageOf(name, "differences")}?group=${encodeURIComponent($("group").dataset.group)}`;
    $("differences").title = "Best and worst side by side; others can be chosen there";
    $("differences").hidden = false;
  }
  const colourOf = agentColours(episodes.flatMap((view) => view.calls.map((call) => call.agent)));
  const show = () => $("columns").replaceChildren(...rows.map((row, index) => column(row, episodes[index], colourOf)));
  rawSwitch(show);
  show();
}
$("columns").dataset.ready = "1";
