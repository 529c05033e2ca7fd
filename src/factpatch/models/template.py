"""Template: how a question becomes a decoder's prompt, and where the answer begins."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from factpatch.errors import InputError, ModelError

CHAT = "chat"
SLOT = "{}"
CHAT_SLOT = "<<question>>"  # a chat template may contain braces of its own
COMPLETION_END = ":"  # without a template, targets are tokenised as they would be after a prompt that ends with this
OPENING = "\"'([{<“‘«"  # characters after which an answer follows without a space


class Template:
    """A text with `{}` for the question, `chat` for the tokenizer's chat template, or None for plain completion.

    The answer follows the prompt after a space, unless the template ends with a line break, an opening quote or an
    opening bracket. Spaces at the end of a prompt are dropped, because tokenizers join them to the answer's first word.
    """

    def __init__(self, text: str | None, tokenizer: PreTrainedTokenizerBase):
        self.text = parse_template(text)
        self.before, self.after = self._parts(tokenizer)
        self.has_special_tokens = self.text == CHAT  # a chat template contains its own begin token
        self.ending = self.after or COMPLETION_END  # what a target is tokenised after
        self.space = "" if self.ending[-1].isspace() or self.ending[-1] in OPENING else " "

    def prompt(self, text: str) -> str:
        return self.before + text.strip() + self.after

    def _parts(self, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
        """Returns the texts before and after the question."""
        if self.text is None:
            return "", ""
        whole, slot = self.text, SLOT
        if self.text == CHAT:
            if not tokenizer.chat_template:
                raise ModelError(
                    "the tokenizer has no chat template; give a --template with {}, or none for plain completion"
                )
            slot = CHAT_SLOT
            turns = [{"role": "user", "content": slot}]
            whole = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        before, separator, after = whole.partition(slot)
        if not separator:
            raise ModelError("the tokenizer's chat template leaves the question out; give a --template with {}")
        return before, after.rstrip(" ")


def parse_template(text: str | None) -> str | None:
    r"""Parses a user's template: `\n` stands for a line break, and an empty text or `none` for no template."""
    if text is None or text.strip() in ("", "none"):
        return None
    if text == CHAT:
        return text
    text = text.replace("\\n", "\n")
    if text.count(SLOT) != 1:
        raise InputError(f"expected a template with one {{}} where the question goes, or chat, found {text!r}")
    return text
