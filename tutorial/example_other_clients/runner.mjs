// A runner in another language: claims episodes of a training run, runs an agent, reports its reward.
//
//   AJET_RUNNER_KEY=… node runner.mjs http://trainer:4747
//
// It needs nothing but Node 18 or later. docs/runners.md says how the trainer is started.

import { randomUUID } from "node:crypto";

const [trainer = "http://127.0.0.1:4747"] = process.argv.slice(2);
const headers = {
  authorization: `Bearer ${process.env.AJET_RUNNER_KEY}`,
  "content-type": "application/json",
  "x-ajet-protocol": "2",
};
const worker_id = `node-${process.pid}`;

async function ask(path, body) {
  const reply = await fetch(`${trainer}/v1/${path}`, { method: "POST", headers, body: JSON.stringify(body) });
  const answer = await reply.json();
  if (!reply.ok) throw new Error(`${path}: ${answer.error.code}: ${answer.error.message}`);
  return answer;
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
    () => ask("store/attempts/heartbeat", { worker_id, attempts: [ids] }).catch(() => {}),
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

let draining = false;
process.on("SIGTERM", () => (draining = true));
try {
  while (!draining) {
    const request_id = randomUUID(); // a claim that is repeated gets the same episodes
    for (const claimed of await ask("store/rollouts/claim", { worker_id, wait_seconds: 5, request_id })) {
      await run(claimed);
    }
  }
} catch (error) {
  console.error(`error: ${trainer}: ${error.cause?.message ?? error.message}`);
  process.exitCode = 1;
}
