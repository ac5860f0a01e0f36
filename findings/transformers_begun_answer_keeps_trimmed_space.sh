#!/usr/bin/env bash
# transformers 5.17.0: continue_final_message keeps the white space that a template trims, if the template writes a
# space after a message.
#
# A begun answer ("Code:" and a newline) is to be continued. A template that trims messages, as Llama 2's and Llama 3's
# do, would never show the model that newline, and with Llama 3's end of a message the newline goes. Llama 2 writes a
# space before its end of a message, and there it stays: the same call, another begun answer.
# Source: apply_chat_template marks the message's end with a tag and a space, and takes a space after the tag in the
# rendered text, the template's own here, for proof that nothing was trimmed.
#
# Seen on 2026-11-27:
#   '</m>': '<assistant>Code:'
#   ' </m>': '<assistant>Code:\n'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.17.0 jinja2==3.1.6
"$folder/venv/bin/python" - <<'PYTHON'
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
begun = [{"role": "assistant", "content": "Code:\n"}]
found = []
for end in ("</m>", " </m>"):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}" + end + "{% endfor %}"
    how = {"chat_template": template, "continue_final_message": True, "tokenize": False}
    found.append(tokenizer.apply_chat_template(begun, **how))
    print(f"{end!r}: {found[-1]!r}")
assert found == ["<assistant>Code:", "<assistant>Code:\n"], "this has changed"
PYTHON
