"""The JSON objects of the API."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from factpatch.serve.limits import ANSWER_CHARS, NOTE_CHARS, PARAPHRASES, QUESTION_CHARS

Question = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=QUESTION_CHARS)]
Target = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=ANSWER_CHARS)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Response(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class AskRequest(_Request):
    question: Question
    with_facts: bool = Field(True, description="Whether to use the accepted facts.")


class ProposeRequest(_Request):
    question: Question
    target: Target = Field(description="The answer that the model should give.")
    paraphrases: list[Question] = Field([], max_length=PARAPHRASES, description="Other wordings of the question.")


class DiscardRequest(_Request):
    id: str = Field(max_length=100, description="The id of the proposal.")


class AcceptRequest(DiscardRequest):
    note: str = Field("", max_length=NOTE_CHARS, description="A remark to keep with the fact, such as its source.")


class Answer(_Response):
    text: str
    probability: float


class Fact(_Response):
    id: int
    x: str = Field(description="The question.")
    before: str = Field(description="The unedited model's answer.")
    target: str = Field(description="The accepted answer.")
    paraphrases: list[str]
    note: str
    added: str
    status: str


class Answered(_Response):
    question: str = Field(description="The question as the model read it.")
    answers: list[Answer] = Field(description="The five best answers, best first.")
    fact: Fact | None = Field(description="The accepted fact that the question is about, if any.")


class Comparison(_Response):
    question: str
    before: list[Answer]
    after: list[Answer]
    changed: bool


class Control(_Response):
    question: str
    before: str = Field(description="The unedited model's answer.")
    after: str = Field(description="The answer under the patch.")
    flipped: bool = Field(description="Whether the patch changes the answer.")
    in_scope: bool = Field(description="Whether the service would use the patch for this question.")


class WeightChange(_Response):
    name: str
    size: float = Field(description="Root mean square of the change.")


class Proposal(_Response):
    id: str = Field(description="Known to you alone. Needed to accept the proposal.")
    success: bool
    question: Comparison
    paraphrases: list[Comparison]
    controls: list[Control]
    weights: list[WeightChange]


class Facts(_Response):
    facts: list[Fact]


class HistoryEvent(_Response):
    time: str
    event: str


class FactHistory(_Response):
    fact: Fact
    history: list[HistoryEvent]


class Verification(_Response):
    holding: list[Fact]
    lost: list[Fact]
    controls: int
    controls_unchanged: int


class Discarded(_Response):
    discarded: bool = True


class Problem(_Response):
    error: str = Field(description="What is wrong and what to do.")
