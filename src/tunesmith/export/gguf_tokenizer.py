"""A tokenizer as llama.cpp wants it: tokens with their kinds, merges or scores, the way text is split first
(pre-tokenizer), and which tokens begin and end.

llama.cpp has a name for each way of splitting that it knows. Here the name is found from what the tokenizer does,
written down in its tokenizer.json; a way that has no name is refused: the model would read other tokens than it
learned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tunesmith.errors import UserError

LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*")
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    (f"{LETTERS}|\\p{{N}}{{1,3}}{REST}",): "llama-bpe",
    (f"{LETTERS}|\\p{{N}}{REST}",): "qwen2",
    (
        LETTERS.replace(r"\p{L}+", r"[\p{L}\p{M}]+") + r"|\p{N}" + REST.replace(r"\p{L}\p{N}", r"\p{L}\p{M}\p{N}"),
    ): "qwen35",
    (rf"{CASED[0]}|{CASED[1]}|\p{{N}}{MARKS}",): "tekken",
    (rf"{CASED[0]}{ENDINGS}|{CASED[1]}{ENDINGS}|\p{{N}}{{1,3}}{MARKS}",): "gpt-4o",
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ): "deepseek-v3",
}
"""Patterns by which texts are split, one after the other, before bytes are merged; and what llama.cpp calls them."""


def write_tokenizer(writer: Any, tokenizer: Any, *, vocabulary: int, ends: Iterable[int], begins: bool = True) -> None:
    """All that llama.cpp needs of it. `vocabulary` are the rows of the model's embedding; `ends` the tokens that end
    turns; `begins`: prompts begin with the token that begins texts, where there is one. UserError where it cannot be
    told to llama.cpp."""
    found = json.loads(tokenizer.backend_tokenizer.to_str())
    kind = found["model"]["type"]
    if kind != "BPE":
        raise UserError(f"This model's tokenizer is of the kind {kind}, and only BPE can be written to GGUF here.")
    if vocabulary < len(tokenizer):
        raise UserError(
            f"The tokenizer has {len(tokenizer):,} tokens, more than the {vocabulary:,} rows of the model's embedding."
        )
    if found["model"].get("byte_fallback"):
        _write_sentencepiece(writer, found, tokenizer, vocabulary)
    else:
        _write_bytes(writer, found, tokenizer, vocabulary)
    _write_special(writer, tokenizer, sorted(ends), begins)


def pre_tokenizer_name(found: dict[str, Any]) -> str:
    """What llama.cpp calls the way in which this tokenizer.json splits texts."""
    steps = _flat(found.get("pre_tokenizer"))
    normalizers = [one["type"] for one in _flat(found.get("normalizer"), "normalizers")]
    kinds = [one["type"] for one in steps]
    last = steps[-1] if steps else {}
    name = None
    if normalizers in ([], ["NFC"]) and last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        uses_own = last.get("use_regex", True)
        if kinds == ["ByteLevel"] and uses_own:
            name = "gpt-2"
        elif kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and uses_own:
            name = "smollm"
        elif set(kinds[:-1]) == {"Split"} and not uses_own and _keep_all(steps[:-1]):
            name = SPLITS.get(tuple(_pattern_of(step) for step in steps[:-1]))
    if name == "llama-bpe" and not found["model"].get("ignore_merges"):
        name = "dbrx"  # the same pattern; words that are tokens themselves are made by merges as others are
    if name is None:
        shown = json.dumps(found.get("pre_tokenizer"), ensure_ascii=False)
        raise UserError(
            f"This model's tokenizer splits texts in a way for which no llama.cpp name is known here ({shown[:200]}); "
            "export it with --to safetensors and use llama.cpp's own converter."
        )
    return name


def _pattern_of(split: dict[str, Any]) -> str:
    """In one of the two ways to write the ends of lines: DeepSeek's has the characters themselves."""
    return split.get("pattern", {}).get("Regex", "").replace("\r", r"\r").replace("\n", r"\n")


def _keep_all(splits: list[dict[str, Any]]) -> bool:
    """Whether all of a text becomes pieces. A pattern that is alone matches all of any text, so that what it does not
    match may be removed."""
    ways = [(split.get("behavior"), bool(split.get("invert"))) for split in splits]
    return set(ways) == {("Isolated", False)} or ways == [("Removed", True)]


def _write_bytes(writer: Any, found: dict[str, Any], tokenizer: Any, vocabulary: int) -> None:
    """Byte-level BPE, as GPT-2's."""
    import gguf

    tokens, kinds = _tokens(found, tokenizer, vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(found))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = [
        one if isinstance(one, str) else " ".join(part.replace(" ", "Ġ") for part in one) for one in _merges(found)
    ]
    if merges:
        writer.add_token_merges(merges)
    else:  # llama.cpp wants the list; a merge that leads to no token is never applied
        writer.add_array(gguf.Keys.Tokenizer.MERGES, ["\u0000 \u0000"])


def _write_sentencepiece(writer: Any, found: dict[str, Any], tokenizer: Any, vocabulary: int) -> None:
    """BPE over characters with bytes for those it does not know, as Llama 2's and Gemma's. llama.cpp merges what gives
    the token with the highest score: here, the one that is merged first."""
    import gguf

    steps = _flat(found.get("pre_tokenizer"))
    normalizers = _flat(found.get("normalizer"), "normalizers")
    if odd := [one for one in (*normalizers, *steps) if not _is_about_spaces(one)]:
        shown = json.dumps(odd[0], ensure_ascii=False)[:200]
        raise UserError(f"This model's tokenizer changes texts by {shown} first, which llama.cpp does not.")
    prefixes = any(one["type"] == "Prepend" for one in normalizers) or any(
        one["type"] == "Metaspace" and one.get("prepend_scheme", "always") != "never" for one in steps
    )
    tokens, types = _tokens(found, tokenizer, vocabulary)
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(_merges(found)):
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        ranks.setdefault(left + right, rank)
    last = len(ranks) + len(_merges(found))
    unknown = found["model"].get("unk_token")
    for index, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[index] = gguf.TokenType.BYTE
        elif token == unknown:
            types[index] = gguf.TokenType.UNKNOWN
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(ranks.get(token, last)) for token in tokens])
    writer.add_token_types(types)
    writer.add_add_space_prefix(prefixes)
    if unknown in tokens:
        writer.add_unk_token_id(tokens.index(unknown))


def _is_about_spaces(step: dict[str, Any]) -> bool:
    """Whether it writes spaces as ▁, or splits at them, which llama.cpp does for itself."""
    kind, space = step["type"], {"String": " "}
    return (
        (kind == "Prepend" and step["prepend"] == "▁")
        or (kind == "Replace" and (step["pattern"], step["content"]) == (space, "▁"))
        or (kind == "Metaspace" and step["replacement"] == "▁")
        or (kind == "Split" and step["pattern"] == space)
    )


def _tokens(found: dict[str, Any], tokenizer: Any, vocabulary: int) -> tuple[list[str], list[int]]:
    """By id, with their kinds; ids without a token get one that no text has."""
    import gguf

    tokens = [f"[PAD{index}]" for index in range(vocabulary)]
    kinds = [int(gguf.TokenType.UNUSED)] * vocabulary
    for token, index in found["model"]["vocab"].items():
        tokens[index], kinds[index] = token, int(gguf.TokenType.NORMAL)
    for index, added in tokenizer.added_tokens_decoder.items():
        tokens[index] = added.content
        kinds[index] = int(gguf.TokenType.CONTROL if added.special else gguf.TokenType.USER_DEFINED)
    return tokens, kinds


def _write_special(writer: Any, tokenizer: Any, ends: list[int], begins: bool) -> None:
    """Which tokens begin and end. llama.cpp stops at eos, eot and eom; the rest it must know by name."""
    text = tokenizer.backend_tokenizer.encode("x", add_special_tokens=True).ids
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None:
        writer.add_bos_token_id(bos)
    writer.add_add_bos_token(begins and bos is not None and text[:1] == [bos])
    writer.add_add_eos_token(eos is not None and text[-1:] == [eos])
    stops = [end for end in (eos, *ends) if end is not None]
    for stop, add in zip(
        dict.fromkeys(stops), (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id), strict=False
    ):
        add(stop)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        writer.add_chat_template([{"name": name, "template": text} for name, text in template.items()])
    elif template:
        writer.add_chat_template(template)


def _merges(found: dict[str, Any]) -> list[Any]:
    return found["model"].get("merges") or []


def _flat(step: dict[str, Any] | None, inner: str = "pretokenizers") -> list[dict[str, Any]]:
    if step is None:
        return []
    return [one for part in step[inner] for one in _flat(part, inner)] if step["type"] == "Sequence" else [step]
