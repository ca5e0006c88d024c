// An agent on Vercel's AI SDK: answers two questions with a tool, and prints the answers as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [protocol, mode] = process.argv.slice(2);
const provider = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY });
const model = provider[protocol](process.env.MODEL);
const results = { "17*3": "51", "51+1": "52", "2*2": "4", "52+1": "53" };
const calculate = tool({
  description: "Calculate an arithmetic expression.",
  inputSchema: z.object({ expression: z.string() }),
  execute: async ({ expression }) => results[expression],
});

const messages = [];
const answers = [];
for (const question of ["17*3+1?", "and one more?"]) {
  messages.push({ role: "user", content: question });
  const request = { model, messages, tools: { calculate }, stopWhen: stepCountIs(9), maxRetries: 0 };
  let reply;
  if (mode === "streamed") {
    const stream = streamText(request);
    await stream.consumeStream();
    reply = { response: await stream.response, text: await stream.text };
  } else {
    reply = await generateText(request);
  }
  messages.push(...reply.response.messages);
  answers.push(reply.text);
}
console.log(JSON.stringify(answers));
