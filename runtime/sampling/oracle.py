"""The native sampling routine in numpy, row by row over the same step buffers: what kernels are compared with."""

from __future__ import annotations

import numpy as np

from mlsdc.runtime.sampling import record as R
from mlsdc.runtime.sampling.noise import gumbel
from mlsdc.runtime.step import Array, Header, StepBuffers


def sample(buffers: StepBuffers, logits: Array, vocab_size: int) -> None:
    """Make `choices`, `logprob_ids` and `logprobs` from logits[out, >= vocab_size] and what the buffers say of each row."""
    for out in range(int(buffers.header[Header.OUT])):
        row = logits[out, :vocab_size]
        words = buffers.sampling[buffers.row_seq[buffers.out_rows[out]]].view(np.int32)
        buffers.choices[out] = choose(buffers, out, row)
        given = int(buffers.given[out])
        wanted = int(words[R.PROMPT_LOGPROBS if given >= 0 else R.LOGPROBS]) if given != R.NO_LOGPROBS else -1
        if wanted >= 0:
            ids, values = logprobs(row, given if given >= 0 else int(buffers.choices[out]), wanted)
            buffers.logprob_ids[out, : len(ids)] = ids
            buffers.logprobs[out, : len(ids)] = values


def choose(buffers: StepBuffers, out: int, logits: Array) -> int:
    """Law L1 for one row."""
    row = int(buffers.out_rows[out])
    seq = int(buffers.row_seq[row])
    record = buffers.sampling[seq]
    words = record.view(np.int32)
    t = int(buffers.positions[row]) + 1
    x = edited(buffers, row, seq, logits, t) if words[R.FLAGS] & R.EDIT else logits
    best = int(np.argmax(x))
    if record[R.INV_T] == 0:
        return best
    with np.errstate(invalid="ignore"):
        z = (x.astype(np.float64) - np.float64(x[best])) * record[R.INV_T]
    kept = survivors(x, z, int(words[R.TOP_K]), float(record[R.TOP_P]), float(record[R.LOG_MIN_P]))
    scores = z[kept] + gumbel(int(record.view(np.uint64)[R.SEED]), t, kept)
    return int(kept[np.argmax(scores)]) if len(kept) else best


def edited(buffers: StepBuffers, row: int, seq: int, logits: Array, t: int) -> Array:
    """The logits after logit_bias, penalties (the row's counts: committed and drafted ancestors), min_tokens and grammar masks, f32."""
    record = buffers.sampling[seq]
    words = record.view(np.int32)
    x = logits.copy()
    for i in range(words[R.NUM_BIAS]):
        x[buffers.bias_ids[seq, i]] += buffers.bias[seq, i]
    if words[R.FLAGS] & R.PENALTIES:
        seen = words[R.NUM_SEEN]
        counts = dict(zip(buffers.seen_ids[seq, :seen].tolist(), buffers.seen_counts[seq, :seen].tolist(), strict=True))
        word = int(buffers.ancestors[row])
        for slot in range(1, 64):
            if word >> slot & 1:
                token = int(buffers.tokens[buffers.seq_row[seq] + slot])
                counts[token] = counts.get(token, 0) + 1
        for token, count in counts.items():
            value = float(x[token])
            x[token] = value / record[R.REPETITION] if value > 0 else value * record[R.REPETITION]
            if count > 0:
                x[token] = float(x[token]) - (record[R.FREQUENCY] * count + record[R.PRESENCE])
    if t < words[R.MIN_UNTIL]:
        x[buffers.ban_ids[seq, : words[R.NUM_BANS]]] = -np.inf
    if words[R.FLAGS] & R.GRAMMAR:
        out = int(np.flatnonzero(buffers.out_rows[: buffers.header[Header.OUT]] == row)[0])
        allowed = np.unpackbits(buffers.masks[out].view(np.uint8), bitorder="little")
        x[allowed[: len(x)] == 0] = -np.inf
    return x


def survivors(x: Array, z: Array, top_k: int, top_p: float, log_min_p: float) -> Array:
    """Ids that top_k, top_p (of what top_k kept) and min_p keep, ascending. z = (x - max) / T; order is (probability, id)."""
    kept = np.argsort(-x, kind="stable")
    kept = kept[x[kept] > -np.inf]
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1:
        mass = np.exp(z[kept])
        before = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
        kept = kept[before < top_p * mass.sum()]
    return np.sort(kept[z[kept] >= log_min_p])


def logprobs(logits: Array, token: int, count: int) -> tuple[list[int], list[float]]:
    """(ids, log probabilities) of `token`, then of the `count` most probable tokens, by the raw logits."""
    x = logits.astype(np.float64)
    top = x.max()
    normal = top + np.log(np.exp(x - top).sum())
    ids = [token, *np.argsort(-x, kind="stable")[:count].tolist()]
    return ids, [float(x[i] - normal) for i in ids]
