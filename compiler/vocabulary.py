"""Whether a drafting model's tokens are the target's: compared row by row, text and special ids, before anything is compiled.

A level may propose anything (law L1), so a wrong token costs speed, not correctness; but a level that speaks another vocabulary never pays,
and nobody would know why. Padding of a vocabulary has no text and is never proposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsdc.compiler.capture import ModelSource
from mlsdc.compiler.errors import HeadError

SHOWN = 5


def check_vocabulary(target: ModelSource, draft: ModelSource, changed: Mapping[int, int]) -> npt.NDArray[Any] | None:
    """None where every token of the draft model is the target's token of the same id; else the target's id of each draft id, i32.

    `changed` says which draft ids are other ids of the target. Raises HeadError that lists the tokens that differ and are not in it.
    """
    theirs, ours = _texts(draft), _texts(target)
    for mine, wanted in changed.items():
        if mine not in theirs or wanted not in ours:
            raise HeadError(f"the map says {mine} -> {wanted}, but {draft.label} has ids below {draft.num_tokens}, "
                            f"{target.label} below {target.num_tokens}")
    wrong = [i for i, text in sorted(theirs.items()) if i not in changed and ours.get(i) != text]
    ends = [i for i in draft.eos_token_ids if changed.get(i, i) not in target.eos_token_ids]
    if wrong:
        listed = ", ".join(f"{i} is {theirs[i]!r}, the target's is {ours.get(i)!r}" for i in wrong[:SHOWN])
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise HeadError(f"{draft.label}: its tokens are not {target.label}'s: {listed}{more}; a `vocabulary_map` can say which they are")
    if ends and target.eos_token_ids:
        raise HeadError(f"{draft.label}: ends with token {ends[0]} ({theirs.get(ends[0])!r}), {target.label} ends with "
                        f"{', '.join(f'{i} ({ours.get(i)!r})' for i in target.eos_token_ids)}; a `vocabulary_map` can say which id it is")
    if not changed:
        return None
    ids = np.arange(int(draft.config["vocab_size"]), dtype=np.int32)
    for mine, wanted in changed.items():
        ids[mine] = wanted
    return ids


def _texts(source: ModelSource) -> dict[int, str]:
    """Token id -> text as the tokenizer's file has it, added tokens included."""
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_str(source.tokenizer_json).get_vocab(with_added_tokens=True)
    return {i: text for text, i in vocabulary.items()}
