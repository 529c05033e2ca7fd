"""Beam search with the same results as `generate`, but faster on large batches of short answers.

`generate` makes a dozen passes over the scores of the whole vocabulary per step, and keeps all rows of a batch until
the last one is finished. Here the scores are read only twice per step, to normalise them and to find the best. Finished
rows leave the batch, and the host waits for the device only once per step. The rules are those of transformers:
2 · beams candidates per step, scores divided by length ** length_penalty, and `early_stopping`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from factpatch.models.decoding import Steps, Stop, rows_that_stay

NEVER = -1.0e9  # a score that loses against every real one
BLOCK = 128  # number of vocabulary tokens that are skipped together if their best score is too low

# Settings of `generate` that this search does not support, with the values for which they have no effect.
_INERT = {
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0.0),
    "exponential_decay_length_penalty": (None,),
    "sequence_bias": (None,),
    "begin_suppress_tokens": (None,),
    "guidance_scale": (None, 1.0),
    "constraints": (None,),
    "force_words_ids": (None,),
}


def supports(config: GenerationConfig) -> bool:
    """Returns True if this search supports these settings, and so gives the same answers as `generate`."""
    banned_words, end_tokens = config.bad_words_ids or [], _end_tokens(config)
    return (
        all(getattr(config, name, None) in values for name, values in _INERT.items())
        and config.early_stopping in (True, False, None)
        and config.decoder_start_token_id is not None
        and config.eos_token_id is not None
        and len(end_tokens) == 1
        and end_tokens not in banned_words
        and all(len(word) == 1 for word in banned_words)
    )


def gives_probabilities(config: GenerationConfig) -> bool:
    """Returns True if scores are log-probabilities of whole sequences: no first token is forced, none is left out."""
    return supports(config) and config.forced_bos_token_id is None and not config.renormalize_logits


def finds_most_likely(config: GenerationConfig) -> bool:
    """Returns True if an answer that is certain to stay among the beams wins by its log-probability alone."""
    return supports(config) and length_penalty(config) == 0 and config.early_stopping is not True


def banned_tokens(config: GenerationConfig, device: torch.device) -> Tensor:
    """Returns the tokens that answers never contain, if the search supports these settings."""
    banned = [word[0] for word in config.bad_words_ids or []] + list(config.suppress_tokens or [])
    return torch.tensor(banned, dtype=torch.long, device=device)


@dataclass
class _Beams:
    """The state of the rows that are still in the batch; B rows with K beams each."""

    running: Tensor  # (B, K, length)  unfinished sequences
    running_scores: Tensor  # (B, K)   sums of log-probabilities
    finished: Tensor  # (B, K, length) best finished sequences, best first
    finished_scores: Tensor  # (B, K)  those sums divided by length ** length_penalty
    is_finished: Tensor  # (B, K)
    improvable: Tensor  # (B, 1)       whether a running sequence may still beat a finished one
    row: Tensor  # (B,)                index of the row in the original batch

    def select(self, rows: Tensor) -> _Beams:
        return _Beams(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


class BestSequences(NamedTuple):
    """The best sequences of each row, best first."""

    sequences: Tensor  # (rows, beams, 1 + tokens)  padded, with the start token in front
    scores: Tensor  # (rows, beams)                 sums of log-probabilities divided by length ** length_penalty


@torch.no_grad()
def beam_search(
    steps: Steps,
    config: GenerationConfig,
    edits: int | None = None,
    stop: Stop | None = None,
    count: int | None = None,
) -> BestSequences:
    """Finds the best sequences of each row. The search may end once the best `count` are known, by default all.

    A sequence ends where `stop` says so, by default with the end token. With `edits`, finished rows leave the batch.
    """
    beams, limit = config.num_beams or 1, 1 + config.max_new_tokens
    end = _end_tokens(config)[0]
    stop = stop or (lambda _, token: token.eq(end))
    steps.start(beams)
    state = _start(steps.rows, beams, limit, config, steps.device)
    banned = banned_tokens(config, steps.device)
    banned_first = torch.tensor(config.begin_suppress_tokens or [], dtype=torch.long, device=steps.device)
    best = BestSequences(state.finished.clone(), state.finished_scores.clone())
    for length in range(1, limit):
        logits = steps.next(state.running[:, :, length - 1].flatten())  # (B·K, vocabulary), first (B, ...)
        if length == 1 and len(banned_first):
            logits = logits.index_fill(1, banned_first, float("-inf"))
        origin = _advance(state, logits, length, config, banned, stop)
        full = state.is_finished.all(-1, keepdim=True) & (config.early_stopping is True)
        done = (~state.improvable | full).squeeze(1) | _is_settled(state, count or beams, length, config)
        all_done, stay = rows_that_stay(done, edits)
        if all_done:
            break
        kept = torch.arange(len(done), device=done.device) if stay is None else stay
        if stay is not None:
            _record(best, state)
            state = state.select(stay)
        steps.select((kept[:, None] * beams + origin[kept]).flatten(), fewer=stay is not None)
    _record(best, state)
    return best


def _record(best: BestSequences, state: _Beams) -> None:
    best.sequences[state.row], best.scores[state.row] = state.finished, state.finished_scores


def _is_settled(state: _Beams, count: int, length: int, config: GenerationConfig) -> Tensor:
    """Returns a mask of the rows whose best `count` sequences can no longer change: (B,).

    Log-probabilities only fall as a sequence grows. Without a bonus for length, the scores fall too, so that no running
    sequence can overtake a finished one with a higher score.
    """
    penalty = length_penalty(config)
    attainable = state.running_scores[:, 0] / length**penalty
    return state.is_finished[:, count - 1] & state.finished_scores[:, count - 1].gt(attainable) & (penalty <= 0)


def _start(rows: int, beams: int, limit: int, config: GenerationConfig, device: torch.device) -> _Beams:
    padding = config.pad_token_id if config.pad_token_id is not None else _end_tokens(config)[0]
    running = torch.full((rows, beams, limit), padding, device=device)
    if config.decoder_start_token_id is not None:
        running[:, :, 0] = config.decoder_start_token_id
    scores = torch.full((rows, beams), NEVER, device=device)
    return _Beams(
        running=running,
        running_scores=torch.zeros_like(scores),
        finished=running.clone(),
        finished_scores=scores,
        is_finished=torch.zeros_like(scores, dtype=torch.bool),
        improvable=torch.ones(rows, 1, dtype=torch.bool, device=device),
        row=torch.arange(rows, device=device),
    )


def _advance(
    state: _Beams, logits: Tensor, length: int, config: GenerationConfig, banned: Tensor, stop: Stop
) -> Tensor:
    """Appends one token in place. Returns the beam that each running sequence continues: (B, K)."""
    rows, beams, limit = state.running.shape
    scores, tokens = _best_tokens(logits, 2 * beams, length, limit, config, banned)  # (B·K, 2K), first (B, 2K)
    scores = scores.view(rows, -1, 2 * beams)
    scores = scores + state.running_scores[:, : scores.shape[1], None]
    scores, picked = scores.flatten(1).topk(2 * beams)  # (B, 2K)
    origin = picked // (2 * beams)
    token = tokens.view(rows, -1).gather(1, picked)
    candidates = state.running.gather(1, origin[:, :, None].expand(-1, -1, limit))  # (B, 2K, length)
    candidates[:, :, length] = token
    ends = stop(candidates[:, :, length - 1], token) | (length + 1 >= limit)

    # Finished sequences stop running. Of those that finish now, only the best K candidates count.
    state.running_scores, chosen = (scores + ends * NEVER).topk(beams)
    state.running = candidates.gather(1, chosen[:, :, None].expand(-1, -1, limit))
    counts = ends & (torch.arange(2 * beams, device=ends.device) < beams)
    closed = state.is_finished.all(-1, keepdim=True) & (config.early_stopping is True) | ~state.improvable
    penalty = length_penalty(config)
    ended = scores / length**penalty + (closed | ~counts) * NEVER
    merged = torch.cat([state.finished_scores, ended], 1)
    state.finished_scores, best = merged.topk(beams)
    sequences = torch.cat([state.finished, candidates], 1)
    state.finished = sequences.gather(1, best[:, :, None].expand(-1, -1, limit))
    state.is_finished = torch.cat([state.is_finished, counts & ~closed], 1).gather(1, best)

    attainable = state.running_scores[:, :1] / length**penalty
    worst = torch.where(state.is_finished, state.finished_scores.min(1, keepdim=True).values, NEVER)
    state.improvable = state.improvable & (attainable > worst).any(1, keepdim=True)
    return origin.gather(1, chosen)


def _best_tokens(
    logits: Tensor, count: int, length: int, limit: int, config: GenerationConfig, banned: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the best next tokens of each sequence and their log-probabilities."""
    forced = config.forced_bos_token_id if length == 1 else None
    if length == limit - 1 and config.forced_eos_token_id is not None:
        forced = config.forced_eos_token_id
    if forced is not None:
        scores = torch.full_like(logits, float("-inf"), dtype=torch.float32)
        scores[:, forced] = 0
        return scores.topk(count)
    if config.renormalize_logits:
        logits.index_fill_(1, banned, float("-inf"))
    log_p = logits.log_softmax(-1, dtype=torch.float32)
    tokens = _top(logits.index_fill_(1, banned, float("-inf")), count)
    return log_p.gather(1, tokens), tokens


def _top(scores: Tensor, count: int) -> Tensor:
    """Returns the indices of the highest scores of each row, best first.

    They lie in the blocks with the highest maxima. On a GPU finding these blocks takes one pass over the scores,
    whereas `topk` over a whole vocabulary makes several.
    """
    blocks = scores.shape[1] // BLOCK
    if blocks <= count or not scores.is_cuda:
        return scores.topk(count).indices
    whole = scores[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK))
    chosen = whole.amax(-1).topk(count).indices[:, :, None]  # (rows, count, 1)
    indices = (chosen * BLOCK + torch.arange(BLOCK, device=scores.device)).flatten(1)
    rest = torch.arange(blocks * BLOCK, scores.shape[1], device=scores.device).expand(len(scores), -1)
    indices = torch.cat([indices, rest], 1)
    return indices.gather(1, scores.gather(1, indices).topk(count).indices)


def length_penalty(config: GenerationConfig) -> float:
    return config.length_penalty if config.length_penalty is not None else 1.0


def _end_tokens(config: GenerationConfig) -> list[int]:
    tokens = config.eos_token_id
    return list(tokens) if isinstance(tokens, list | tuple) else [int(tokens or 0)]
