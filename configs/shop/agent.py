"""The agent of the shop, as it runs without training: a loop around OpenAI's chat completions, with one tool."""

import json

from openai import AsyncOpenAI

from configs.shop.orders import price

PARAMETERS = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOLS = [{"type": "function", "function": {"name": "price", "description": "Its price.", "parameters": PARAMETERS}}]


async def answer(client: AsyncOpenAI, messages: list) -> str:
    """Let the model look prices up until it answers."""
    while True:
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        said = reply.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return said.content or ""
        for call in said.tool_calls:
            try:
                result = str(price(**json.loads(call.function.arguments)))
            except (KeyError, TypeError, ValueError) as error:
                result = f"error: {error!r}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
