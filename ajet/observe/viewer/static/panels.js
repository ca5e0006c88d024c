// The charts, their order, and the metrics each of them shows.
const percent = { format: (value) => value === null ? "–" : `${Number((100 * value).toPrecision(3))} %` };

export const SECTIONS = [
  { title: "Outcome", panels: [
    { title: "Training and validation", metrics: ["return/mean", "val/return/mean"], labels: ["training", "validation"], alone: true, hint: "mean return" },
    { title: "Return", metrics: ["return/mean"], hint: "with the rewards of calls and agents" },
    { title: "Reward", metrics: ["reward/mean"] },
    { title: "Parts of the reward", match: /^reward\/(?!(mean|std|min|max)$)/, hint: "before weighting" },
    { title: "Success", metrics: ["success/rate"], ...percent },
    { title: "pass@k", match: /^success\/pass@\d+$/, ...percent },
    { title: "Validation return", metrics: ["val/return/mean"] },
    { title: "Validation success", match: /^val\/success\/(rate|pass@\d+)$/, ...percent },
  ] },
  { title: "Episodes", panels: [
    { title: "Turns", metrics: ["episode/turns"], hint: "mean per episode" },
    { title: "Reply length", metrics: ["episode/reply_length"], hint: "sampled tokens per call" },
    { title: "Tokens per episode", metrics: ["episode/tokens", "episode/sampled_tokens", "episode/trained_tokens"] },
    { title: "How episodes ended", match: /^status\//, stacked: true, hint: "episodes" },
    { title: "Failed episodes", metrics: ["episode/failed_share", "val/failed_share"], labels: ["training", "validation"], ...percent, hint: "they count in no mean" },
    { title: "Outcomes", match: /^outcome\//, stacked: true, hint: "episodes the model cut short" },
    { title: "Failures", match: /^failure\//, stacked: true, hint: "episodes by error" },
  ] },
  { title: "Policy", panels: [
    { title: "Loss", metrics: ["train/loss"] },
    { title: "KL", metrics: ["train/kl"], hint: "to the starting model" },
    { title: "Entropy", metrics: ["train/entropy"] },
    { title: "Clip fraction", metrics: ["train/clip_fraction"], ...percent },
    { title: "Gradient norm", metrics: ["train/grad_norm"] },
    { title: "Staleness", metrics: ["train/staleness"], hint: "policy versions" },
    { title: "Learning rate", metrics: ["train/lr"] },
  ] },
  { title: "Speed", panels: [
    { title: "Tokens per second", metrics: ["perf/tokens_per_second"] },
    { title: "Time per step", metrics: ["time/rollout", "time/train", "time/sync"], stacked: true, hint: "seconds" },
    { title: "Packing ratio", metrics: ["train/packing_ratio"], hint: "tokens in rows / tokens computed" },
  ] },
  { title: "Where tokens went", panels: [
    { title: "Masked", match: /^masked\//, stacked: true, hint: "tokens without loss" },
    { title: "Dropped", match: /^dropped\//, stacked: true, hint: "tokens in no sample" },
    { title: "Forks", match: /^fork\//, stacked: true, hint: "calls that could not extend another" },
  ] },
];

/** Sections that are folded until somebody opens them: what no section above shows, but for the workflow's own metrics. */
export const foldedAtFirst = (title) => !SECTIONS.some((section) => section.title === title) && title !== TITLES.user;

/** What compared runs came to. */
export const RESULTS = [
  { label: "Return", metric: "return/mean", first: true }, { label: "Best return", metric: "return/mean", best: true },
  { label: "Best validation", metric: "val/return/mean", best: true }, { label: "KL", metric: "train/kl" }, { label: "Entropy", metric: "train/entropy" },
  { label: "Tokens per second", metric: "perf/tokens_per_second" }, { label: "Seconds per step", metric: "time/step" },
];

/** The two charts of a run's overview. */
export const OVERVIEW = [
  { title: "Reward", metrics: ["return/mean"], hint: "mean return of training" },
  { title: "Validation", metrics: ["val/return/mean"], hint: "mean return" },
];

/** Those metrics of a panel that at least one run has. */
export function metricsOf(panel, names) {
  return panel.match ? names.filter((name) => panel.match.test(name)) : panel.metrics.filter((name) => names.includes(name));
}

/** Panels for the metrics that no section above shows, grouped by prefix. */
export function otherSections(names) {
  const shown = new Set(["time", "val/time"]);
  for (const section of SECTIONS) for (const panel of section.panels) for (const name of metricsOf(panel, names)) shown.add(name);
  const groups = new Map();
  for (const name of names) {
    if (shown.has(name)) continue;
    const prefix = name.includes("/") ? name.slice(0, name.indexOf("/")) : "other";
    if (!groups.has(prefix)) groups.set(prefix, []);
    groups.get(prefix).push({ title: name.slice(name.indexOf("/") + 1), metrics: [name] });
  }
  const order = ["user", "tag", "val", "reward", "success", "episode", "time"];
  const rank = (prefix) => (order.indexOf(prefix) + order.length + 1) % (order.length + 1);
  return [...groups].sort(([a], [b]) => rank(a) - rank(b) || a.localeCompare(b)).map(([prefix, panels]) => ({ title: TITLES[prefix] || prefix, panels }));
}
const TITLES = { user: "Logged by the workflow", tag: "By tag", val: "Validation", reward: "More about rewards", episode: "More about episodes", time: "More times", train: "More about training", perf: "More about speed", loss: "More about the loss", tokens: "Tokens per update", credit: "Credit", ledger: "Ledger: where sampled tokens went" };
