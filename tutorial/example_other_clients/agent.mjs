// A tool-using agent in Node.js with the npm package `openai`. The package reads OPENAI_BASE_URL and OPENAI_API_KEY.
import OpenAI from "openai";

const client = new OpenAI();
const tools = [
  {
    type: "function",
    function: {
      name: "add",
      description: "Add numbers.",
      parameters: { type: "object", properties: { numbers: { type: "array", items: { type: "number" } } } },
    },
  },
];

function add(given) {
  try {
    return String(JSON.parse(given).numbers.reduce((sum, number) => sum + number, 0));
  } catch (error) {
    return `error: ${error.message}`;
  }
}

const messages = [
  { role: "system", content: "You solve math problems. Use the adder. Give the final answer as \\boxed{number}." },
  { role: "user", content: process.env.QUESTION },
];

for (let turn = 0; turn < 4; turn++) {
  const stream = client.chat.completions.stream({ model: process.env.MODEL, messages, tools });
  const { message } = (await stream.finalChatCompletion()).choices[0];
  messages.push(message);
  if (!message.tool_calls?.length) break;
  for (const call of message.tool_calls) {
    messages.push({ role: "tool", tool_call_id: call.id, content: add(call.function.arguments) });
  }
}
const last = messages[messages.length - 1];
console.log(last.role === "assistant" ? (last.content ?? "").replaceAll("\n", " ") : "");
