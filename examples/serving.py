"""OpenAI's client and `dofla serve`: a conversation whose state stays with the server, so that a turn costs its own
tokens. Needs dofla[serve].

    python examples/serving.py [MODEL] [MESSAGE]
"""

from __future__ import annotations

import re
import subprocess
import sys
from tempfile import TemporaryDirectory

from chat import TEMPLATE
from openai import OpenAI
from opening import open_converted


def main(name: str = "demo", message: str = "Tell me a story about a dog.") -> list[dict[str, str]]:
    with TemporaryDirectory() as folder:
        model, tokenizer = open_converted(name)
        tokenizer.chat_template = tokenizer.chat_template or TEMPLATE
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        words = [sys.executable, "-m", "dofla", "serve", folder, "--port", "0"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
            try:
                place = re.search(r"http\S+", server.stdout.readline())[0]
                return converse(OpenAI(base_url=place, api_key="none"), message, "And then?")
            finally:
                server.terminate()


def converse(client: OpenAI, *questions: str) -> list[dict[str, str]]:
    messages = []
    model = next(iter(client.models.list())).id
    for said in questions:
        messages.append({"role": "user", "content": said})
        print(f"> {said}")
        options = {"model": model, "messages": messages, "max_tokens": 40, "temperature": 0, "stream": True}
        parts = []
        for part in client.chat.completions.create(**options):
            parts.append((part.choices and part.choices[0].delta.content) or "")
            print(parts[-1], end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": "".join(parts)})
    return messages


if __name__ == "__main__":
    main(*sys.argv[1:])
