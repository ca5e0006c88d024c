// What a search for prompt templates has found, and what can be read off it.
import { mean } from "./common.js";

const byNumber = (a, b) => a.localeCompare(b, "en", { numeric: true });
/** What counts in a mean: a failure 0, a fault of engine or machine nothing. */
export const valueOf = (trial) => (trial.fault ? null : trial.reward ?? 0);

export class Search {
  constructor(record) {
    Object.assign(this, record);
    this.byId = new Map(this.candidates.map((one) => [one.id, one]));
    this.candidates = [...this.byId.values()].sort((a, b) => byNumber(a.id, b.id));
    this.children = new Map();
    for (const one of this.candidates) {
      const parent = this.parentOf(one);
      if (parent) this.children.set(parent.id, [...(this.children.get(parent.id) || []), one]);
    }
    this.trials = new Map();
    for (const score of this.scores) for (const trial of score.trials) this.keep(score, trial);
    this.means = new Map();
    for (const [purpose, candidates] of this.trials) for (const [id, tasks] of candidates) this.means.set(`${purpose} ${id}`, mean([...tasks.values()].flat().map(valueOf).filter((value) => value !== null)));
    const last = this.rounds.at(-1);
    this.bestId = last?.best ?? this.best?.candidate ?? "";
  }

  keep(score, trial) {
    const level = (map, key, fresh) => map.get(key) || map.set(key, fresh).get(key);
    const tasks = level(level(this.trials, score.purpose, new Map()), score.candidate, new Map());
    // the same tasks and seeds again, after an interruption, are the same measurement
    if (["validation", "confirmation"].includes(score.purpose)) tasks.set(trial.task, [trial]);
    else level(tasks, trial.task, []).push(trial);
  }

  /** The first of its parents that is known and came before it. */
  parentOf(one) { return one.parents.map((id) => this.byId.get(id)).find((parent) => parent && byNumber(parent.id, one.id) < 0) || null; }

  get purposes() { return ["validation", "confirmation", "batch", "search"].filter((purpose) => this.trials.has(purpose)); }

  trialsOf(purpose, id) { return this.trials.get(purpose)?.get(id) || new Map(); }

  meanOf(purpose, id) { return this.means.get(`${purpose} ${id}`) ?? null; }

  /** Its mean over all validation tasks, or else over the batches that it was tried on. */
  scoreOf(id) {
    for (const purpose of ["validation", "batch", "search"]) {
      const value = this.meanOf(purpose, id);
      if (value !== null) return { purpose, value, tasks: this.trialsOf(purpose, id).size };
    }
    return null;
  }

  /** In the order of an outline: each candidate under the one that it came from. */
  outline() {
    const rows = [], walk = (one, depth) => { rows.push({ one, depth }); for (const child of this.children.get(one.id) || []) walk(child, depth + 1); };
    for (const one of this.candidates) if (!this.parentOf(one)) walk(one, 0);
    return rows;
  }

  /** On how many tasks one does better than another, worse, and as well. */
  against(purpose, id, other) {
    const [ours, theirs] = [this.trialsOf(purpose, id), this.trialsOf(purpose, other)];
    const found = { better: 0, worse: 0, same: 0 };
    for (const [task, trials] of ours) {
      const [a, b] = [meanOfTrials(trials), meanOfTrials(theirs.get(task) || [])];
      if (a === null || b === null) continue;
      found[a > b ? "better" : a < b ? "worse" : "same"] += 1;
    }
    return found;
  }
}

export const meanOfTrials = (trials) => mean(trials.map(valueOf).filter((value) => value !== null));
