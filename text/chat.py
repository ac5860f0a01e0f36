"""Chat templates turn a conversation into text for the model. A checkpoint brings its own template, a Jinja program.

`render` runs it as transformers does, in jinja2's immutable sandbox: a template can access no file, module or private
attribute and cannot change its inputs. The sizes of a template and of its output are limited; time and memory are
not, so a template can loop for hours or fill the memory with one long text: checkpoints are trusted that far.
"""

import json
from datetime import datetime
from functools import lru_cache

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST = 200_000  # characters of a template
GROWTH = 1_000_000  # characters that a template may add to a conversation
MESSAGE = 300  # characters shown of a template's error message


def render(template: str, messages: list[dict[str, str]], variables: dict[str, str]) -> str:
    """The conversation as text, up to the header of the next answer; `variables` are bos_token and the like.

    Raises a one-line ValueError if the template rejects the conversation, is damaged, or exceeds the limits on sizes.
    """
    left = GROWTH + sum(len(m["content"]) for m in messages)
    pieces = []
    try:
        if len(template) > LONGEST:
            raise ValueError(f"it has more than {LONGEST} characters")
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        for piece in _compiled(template).generate(variables | given):
            left -= len(piece)
            if left < 0:
                raise ValueError(f"it adds more than {GROWTH} characters")
            pieces.append(piece)
    except Exception as error:  # a template is a program and can raise anything
        said = " ".join((str(error)[:MESSAGE] or type(error).__name__).split())
        said = "".join(c if c.isprintable() else "\ufffd" for c in said)  # no escape sequence reaches a terminal
        raise ValueError(f"the checkpoint's chat template fails: {said}") from None
    return "".join(pieces)


class Generation(Extension):
    """{% generation %}: marks an answer's text for training; here it renders that text unchanged."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def raise_exception(message):
    raise jinja2.TemplateError(str(message)[:MESSAGE])


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json  # jinja2's own filter escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)
