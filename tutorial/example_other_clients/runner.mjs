// A runner in another language: claims episodes of a training run, runs an agent, reports its reward.
//
//   AJET_RUNNER_KEY=… node runner.mjs http://trainer:4747 [patience]
//
// While the trainer is not there, it waits for it: `patience` seconds (600), and five if it was asked to end.
// It needs nothing but Node 18 or later. docs/runners.md says how the trainer is started.

import { randomUUID } from "node:crypto";

const [trainer = "http://127.0.0.1:4747", patience = "600"] = process.argv.slice(2);
const headers = {
  authorization: `Bearer ${process.env.AJET_RUNNER_KEY}`,
  "content-type": "application/json",
  "x-ajet-protocol": "2",
};
let draining = false;
process.on("SIGTERM", () => (draining = true));
const worker_id = `node-${process.pid}`;

const AWAY = /^(E(?!RR_)[A-Z_]+|UND_ERR_\w+)$/; // ECONNREFUSED and its like
class Away extends Error {}

async function askOnce(path, body) {
  let reply, text;
  try {
    reply = await fetch(`${trainer}/v1/${path}`, { method: "POST", headers, body: JSON.stringify(body) });
    text = await reply.text();
  } catch (error) {
    const { code, message } = error.cause ?? error;
    if (AWAY.test(code)) throw new Away(message || code);
    throw new Error(message); // no URL, or a certificate that nobody signed: waiting doesn't help
  }
  if ([429, 502, 503, 504].includes(reply.status)) throw new Away(`${reply.status} ${text.slice(0, 200)}`);
  let answer;
  try {
    answer = JSON.parse(text);
  } catch {
    throw new Error(`${path}: ${reply.status}, and no JSON: is this the trainer's address?`);
  }
  if (!reply.ok) throw new Error(`${path}: ${answer.error?.code}: ${answer.error?.message}`);
  return answer;
}

// Every request here is safe to repeat, so one whose answer was lost is simply sent again.
async function ask(path, body) {
  const began = Date.now();
  for (let pause = 50; ; pause = Math.min(2 * pause, 2000)) {
    try {
      return await askOnce(path, body);
    } catch (error) {
      const limit = draining ? Math.min(5, patience) : patience;
      if (!(error instanceof Away) || Date.now() + pause > began + 1000 * limit) throw error;
      if (pause === 50) console.error(`${trainer}: ${error.message}: waiting for it`);
    }
    await new Promise((wake) => setTimeout(wake, pause));
  }
}

// The agent itself: any code that calls an OpenAI-compatible endpoint. Returns a reward, or null to ask the judge.
async function agent(task, model) {
  const reply = await fetch(`${model.base_url}/chat/completions`, {
    method: "POST",
    headers: { authorization: `Bearer ${model.api_key}`, "content-type": "application/json" },
    body: JSON.stringify({ model: "agent", messages: [{ role: "user", content: task.main_query }] }),
  });
  if (!reply.ok) throw new Error(`model: ${reply.status} ${await reply.text()}`);
  const text = (await reply.json()).choices[0].message.content ?? "";
  return { reward: text.includes(String(task.metadata.answer)) ? 1 : 0, metadata: { answer: text } };
}

async function run({ rollout, attempt }) {
  const ids = { rollout_id: rollout.rollout_id, attempt_id: attempt.attempt_id };
  const beat = setInterval(
    () => askOnce("store/attempts/heartbeat", { worker_id, attempts: [ids] }).catch(() => {}),
    (rollout.config.unresponsive_seconds ?? 40) * 250,
  );
  let result;
  try {
    const model = await ask("runner/open", { ...ids, ticket: rollout.input.ticket, targets: null });
    result = { finished: true, ...(await agent(rollout.input.task.task, model)) };
  } catch (error) {
    const failure = { kind: error.name, message: error.message, traceback: error.stack ?? "" };
    result = { finished: false, failed_in: "workflow", failure };
  } finally {
    clearInterval(beat);
  }
  const update = { ...ids, status: "succeeded", result: JSON.stringify(result) };
  await ask("store/attempts/update", { updates: [update] });
}

try {
  if (!(patience >= 0)) throw new Error(`'${patience}' is no number of seconds to wait for it`);
  while (!draining) {
    const request_id = randomUUID(); // a claim that is repeated gets the same episodes
    for (const claimed of await ask("store/rollouts/claim", { worker_id, wait_seconds: 5, request_id })) {
      await run(claimed);
    }
  }
} catch (error) {
  console.error(`error: ${trainer}: ${error.message}`);
  process.exitCode = 1;
}
