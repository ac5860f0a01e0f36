"""The text of an answer while its tokens arrive."""

from text.tokenizer import Tokenizer


class AnswerText:
    """Turns tokens into text, and looks for texts that end the answer."""

    def __init__(self, tokenizer: Tokenizer | None, stop: list[str] | None):
        """Without a tokenizer the text stays empty. stop: texts that end the answer and are cut off."""
        self.stream, self.stop = tokenizer and tokenizer.stream(), stop or []
        self.text = ""
        self.shown = 0  # characters that `push` has returned
        self.stopped = False  # a stop text was found

    def push(self, token: int | None, last: bool) -> str:
        """Adds a token (None: an EOS), perhaps the last; returns the text that may now be shown."""
        searched = len(self.text)
        if self.stream is not None:
            self.text += "" if token is None else self.stream.push(token)
            self.text += self.stream.flush() if last else ""
        begin = max(0, searched - max(map(len, self.stop), default=0))  # earlier text has no stop text
        cut = min((at for text in self.stop if (at := self.text.find(text, begin)) >= 0), default=None)
        self.stopped, self.text = cut is not None, self.text[:cut]
        # The end may be the start of a stop text: hold that much back until it is certain.
        begun = (n for text in self.stop for n in range(len(text)) if self.text.endswith(text[:n]))
        held = 0 if last or self.stopped else max(begun, default=0)
        visible = self.text[self.shown : len(self.text) - held]
        self.shown += len(visible)
        return visible
