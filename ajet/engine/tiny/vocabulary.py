"""The text that the tiny tokenizer learns its merges from, and the boilerplate that it holds as single tokens.

Everything here is part of the tokenizer: a change gives other token ids, so `TOKENIZER_VERSION` goes up with it.
"""

from __future__ import annotations

TOKENIZER_VERSION = 1

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
SPECIAL = (END_OF_TEXT, MESSAGE_START, MESSAGE_END)

TOOLS_INTRODUCTION = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_CLOSING = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

BOILERPLATE = (
    TOOLS_INTRODUCTION,
    TOOLS_CLOSING,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {',
    '": {"type": "string"',
    '": {"type": "number"',
    '": {"type": "integer"',
    '}, "required": ["',
    '{"name": "',
    '", "arguments": {',
    "system\n",
    "user\n",
    "assistant\n",
)
"""Added tokens that are ordinary text: they keep prompts short, and decode to exactly what was written."""

CORPUS = """
You are a helpful assistant. You are a math agent. You are an agent that answers the question of the user.
Answer the question. Give the final answer as a number. The final answer is in the box. Put your final answer within
\\boxed{}. Use the calculator to compute the result. Use the tool when you need it, then answer. Think step by step.
Let me think about this. Let me compute the sum. Let me use the calculator. I will call the calculator tool. I need to
find the value of the expression. The result is correct. The answer is not correct. Try again. Please try again.
What is the sum of the numbers? What is the product of the numbers? What is the difference between the two numbers?
How many are left? How much does it cost? How many apples does she have? He has twice as many as she does. There were
more than the others. Each of them bought some more. Calculate the total. Evaluate the expression. Compute the value.
plus minus times divided by equals. The quotient and the remainder. First, second, third, then next and last.
"calculator" "calculator" "calculator" "expression" "expression" "expression" "description" "description" "python"
"code" "search" "query" "answer" "name" "arguments" "action" "result" "number" "What "What "The "The "You "You
A calculator. Evaluates an arithmetic expression.
python code execute python code to compute the result. search query search the web for information with the search tool.
name description type string arguments function tool result error message invalid expression: syntax error
The code is run and its output is returned. Returns the result of the expression. The expression to evaluate.
Go up, go down, go left, go right. Move up. Move down. Move left. Move right. You are on the frozen lake. The goal is to
reach the gift without falling into a hole. Your turn. Your move. The game is over. You win. You lose. Next state.
Read the file. Write the file. List the files. Open the page. Click the button. The user wants to know something.
The task is to write a short answer. The task is done. This is the end of the conversation. Thank you for the question.
Hello, how can I help you today? I am a language model. I do not know. I can help with that. Here is the answer.
Is it true or false? Yes or no? True. False. Yes. No. ok. It is good. It is bad. Say hello to the world. hello world
The weather is nice today. The capital of the country is a city. The water is cold. The house is on the hill. The man
and the woman were walking with their children. A cat sat on the mat. The quick brown fox jumps over the lazy dog.
"""
