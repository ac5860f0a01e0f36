"""Chat templates turn a conversation into text for the model. A checkpoint brings its own template, a Jinja program.

`render` runs it as transformers does, in jinja2's immutable sandbox: a template can access no file, module or private
attribute and cannot change its inputs. The sandbox is in a separate process (`python chat.py`), limited to SECONDS per
answer and BYTES of memory: a template that never ends, or whose text never ends, affects only that process.
"""

import atexit
import json
import select
import subprocess
import sys
import threading
from datetime import datetime
from functools import lru_cache

SECONDS = 10
BYTES = 1 << 30
GROWTH = 1_000_000  # characters that a template may add to a conversation

# For checkpoints without a template: (control tokens the vocabulary must have, template).
DEFAULTS = {
    "llama-3": (
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n{{ '' }}",
    ),
    "chatml": (
        ("<|im_start|>", "<|im_end|>"),
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n{{ '' }}",
    ),
    "mistral-v0.3": (
        ("[INST]", "[/INST]"),
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'system' %}[INST] {{ m.content }}\n\n"
        "{% elif m.role == 'user' %}{{ '[INST] ' if loop.first or loop.previtem.role != 'system' }}"
        "{{ m.content }}[/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    ),
}
CONTROL_TOKENS = {"[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"}.union(*(tokens for tokens, _ in DEFAULTS.values()))


def render(template: str, messages: list[dict[str, str]], variables: dict[str, str]) -> str:
    """The conversation as text, up to the header of the next answer; `variables` are bos_token and the like.

    Raises a one-line ValueError if the template rejects the conversation, is damaged, or exceeds its limits.
    """
    found = _worker.ask({"template": template, "messages": messages, "variables": variables})
    if "error" in found:
        raise ValueError(f"the checkpoint's chat template fails: {' '.join(found['error'].split())}")
    return found["text"]


class Worker:
    """The rendering process: started on first use, and restarted after it was stopped."""

    def __init__(self):
        self.process: subprocess.Popen | None = None
        self.lock = threading.Lock()

    def ask(self, request: dict) -> dict:
        with self.lock:
            try:
                if self.process is None or self.process.poll() is not None:
                    self.stop()
                    command = [sys.executable, "-P", __file__]
                    self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                self.process.stdin.write(json.dumps(request).encode() + b"\n")
                self.process.stdin.flush()
                ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
                answer = self.process.stdout.readline() if ready else b""
            except BrokenPipeError:
                ready, answer = True, b""
            except BaseException:  # Ctrl-C: the pending answer must not reach the next call
                self.stop()
                raise
            if not answer:
                self.stop()
                return {"error": "it ended the process that renders it" if ready else f"it takes more than {SECONDS} s"}
            return json.loads(answer)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


_worker = Worker()
atexit.register(_worker.stop)


# The rendering process


@lru_cache
def _compiled(template: str):
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %}: marks an answer's text for training; here it renders that text unchanged."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json  # jinja2's own filter escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _answer(line: str) -> dict:
    try:
        request = json.loads(line)
        text = _compiled(request["template"]).render(
            messages=request["messages"], tools=None, documents=None, add_generation_prompt=True, **request["variables"]
        )
        if len(text) > len(line) + GROWTH:
            return {"error": f"it adds more than {GROWTH} characters"}
        return {"text": text}
    except MemoryError:
        return {"error": f"it needs more than {BYTES >> 20} MB"}
    except ImportError as error:
        return {"error": f"{error}: pip install jinja2"}
    except Exception as error:  # a template is a program and can raise anything
        return {"error": str(error) or type(error).__name__}


def main() -> None:
    import resource
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and kills this process at exit
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    for line in sys.stdin:
        print(json.dumps(_answer(line)), flush=True)


if __name__ == "__main__":
    main()
