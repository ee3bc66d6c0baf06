"""A conversation through the tokenizer's chat template. The bundled demo model never learned to chat: it is given a
template here, and makes of it what it can; a model that has one (SmolLM2-Instruct) answers.

    python examples/chat.py [MODEL] [MESSAGE]
"""

from __future__ import annotations

import sys

from opening import open_converted

import dofla

TEMPLATE = """\
{%- for message in messages -%}
{{ message.role.capitalize() }}: {{ message.content }}
{% endfor -%}
{%- if add_generation_prompt %}Assistant:{% endif -%}"""


def main(name: str = "demo", message: str = "Tell me a story about a dog.") -> list[dict[str, str]]:
    model, tokenizer = open_converted(name)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = TEMPLATE
    session, messages = dofla.serving.Session(model), []  # each turn reads only what is new
    for said in (message, "And then?"):
        messages.append({"role": "user", "content": said})
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(messages, **options).to(model.device)
        out = session.generate(**inputs, max_new_tokens=40, do_sample=False)
        answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
        messages.append({"role": "assistant", "content": answer})
        print(f"> {said}\n{answer}")
    return messages


if __name__ == "__main__":
    main(*sys.argv[1:])
