from __future__ import annotations

import pickle

import numpy as np
import pytest

from tunesmith.data.chat import Encoder
from tunesmith.data.guard import Watch, check_dataset, check_encoder, example_hash, missing_kinds, overlap_warnings
from tunesmith.data.types import Completion, Conversation, Document, Example, Message, Origin, Record, Tokens
from tunesmith.errors import UserError

BODY = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def checked(tokenizer, vocab_size=None, train_on="assistant"):
    encoder = Encoder(tokenizer, template=None, train_on=train_on)
    return check_encoder(encoder, tokenizer, vocab_size or len(tokenizer))


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_sound_templates_pass_without_a_warning(chatml, llama3, marked, inst, base, train_on):
    for tokenizer in (chatml, llama3, marked, inst, base):
        assert checked(tokenizer, train_on=train_on) == []


def test_templates_with_a_peculiarity_are_reported(gemma, reasoning, make_tokenizer):
    assert "no system role" in " ".join(checked(gemma))
    assert "each turn of a longer conversation becomes an example of its own" in " ".join(checked(reasoning))
    plain = "{% for m in messages %}" + BODY + "{% endfor %}"
    assert "no generation prompt" in " ".join(checked(make_tokenizer(plain)))
    assert "26 Jul 2024" in " ".join(checked(make_tokenizer("{{ strftime_now('%Y') }}" + plain + ASK)))
    thinks = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.reasoning_content %}"
        "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    )
    always = make_tokenizer(thinks + ASK.replace("' }}", "<think>' }}"))
    assert "answers need their `reasoning_content`" in " ".join(checked(always))
    with_bos = make_tokenizer(plain + ASK, bos="<bos>", adds_bos=True)
    assert "begins texts with <bos>, but the chat template does not" in " ".join(checked(with_bos))


WRONG = {
    "drops a role": (
        "{% for m in messages %}{% if m.role == 'user' %}" + BODY + "{% endif %}{% endfor %}" + ASK,
        "drops messages of the assistant",
    ),
    "drops earlier messages": (
        "{% for m in messages[-2:] %}" + BODY + "{% endfor %}" + ASK,
        "drops messages of the user",
    ),
    "reorders": ("{% for m in messages | reverse %}" + BODY + "{% endfor %}" + ASK, "in another order"),
    "doubles BOS": ("{{ bos_token + bos_token }}{% for m in messages %}" + BODY + "{% endfor %}" + ASK, "<bos> twice"),
    "never ends": ("{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}", "never learn to stop"),
    "end not marked": (
        "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %}"
        "{{ '<|im_end|>' }}{% endfor %}",
        "never learn to stop",
    ),
    "refuses": ("{{ raise_exception('no chats today') }}", "no chats today"),
    "does not fit its prompt": (
        "{% for m in messages %}" + BODY + "{% endfor %}{% if add_generation_prompt %}<think>{% endif %}",
        "asks for an answer with '<think>'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_template_that_would_train_wrong_is_refused(name, make_tokenizer):
    template, message = WRONG[name]
    with pytest.raises(UserError, match=message) as caught:
        checked(make_tokenizer(template, bos="<bos>"))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_refused(chatml):
    with pytest.raises(UserError, match=r"knows \d+ tokens .* embeddings for only 300"):
        checked(chatml, vocab_size=300)
    checked(chatml, vocab_size=len(chatml) + 64)


def test_a_base_model_without_end_of_text_is_refused(make_tokenizer):
    tokenizer = make_tokenizer(None)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end-of-text token"):
        checked(tokenizer)


def seen(encoder, *items, vocab_size=1000) -> Watch:
    watch = Watch(encoder.end_ids, vocab_size)
    for line, item in enumerate(items, start=1):
        record = Record({}, Origin("data.jsonl", line))
        for example in encoder.encode_all(item, record.origin):
            watch.see(record, item, example)
    return watch


def chat(question, answer, weight=None):
    return Conversation((Message("user", question), Message("assistant", answer, weight)))


@pytest.fixture
def encoder(chatml):
    return Encoder(chatml, template=None, train_on="assistant")


def test_placeholders_and_markup_left_in_the_text_are_counted_with_their_first_place(encoder):
    watch = seen(
        encoder,
        chat("Hi", "Hello"),
        chat("Who?", "I am {{name}} by {{ author }}, {{name}}."),
        Completion("Hi", "I am {{name}}, not {plain} nor {{ 1 + 1 }}."),
        Document("<|im_start|>user [/INST]"),
    )
    assert watch.warnings() == [
        "data.jsonl, line 2: the placeholder {{name}} is left in the text (2 records); the model will learn to say it.",
        "data.jsonl, line 2: the placeholder {{ author }} is left in the text (1 record); "
        "the model will learn to say it.",
        "data.jsonl, line 4: the text holds <|im_start|>, which chat templates write themselves (1 record); "
        "give the bare text.",
        "data.jsonl, line 4: the text holds [/INST], which chat templates write themselves (1 record); "
        "give the bare text.",
    ]


def test_answers_that_begin_with_their_question_are_counted(encoder):
    question = "What is the capital of France?"
    watch = seen(
        encoder,
        chat(question, "Paris"),
        chat(question, f" {question} Paris"),
        Completion(question, f"{question}\nParis"),
        chat("Hi", "Hi there"),
    )
    assert watch.warnings() == [
        "data.jsonl, line 2: the answer begins with the whole question (2 records), so the model will learn to repeat "
        "it; give the answer alone."
    ]


def test_watches_of_workers_merge_to_what_one_would_have_seen(encoder, reasoning):
    items = [chat("Hi", "I am {{name}}"), chat("Hi", "two"), chat("Hi", "x", 0.0), chat("{{a}}", "{{name}} <s>")]
    whole = seen(encoder, *items)
    merged = Watch(encoder.end_ids, 1000)
    for line, item in enumerate(items, start=1):
        part, record = Watch(encoder.end_ids, 1000), Record({}, Origin("data.jsonl", line))
        part.see(record, item, encoder.encode(item, record.origin))
        merged.merge(pickle.loads(pickle.dumps(part)))
    assert merged == whole
    assert whole.examples == 4
    assert whole.untargeted.count == 1
    assert "line 3: nothing is learned from this record (1 of 4 examples have no target token)" in whole.warnings()[-1]


def test_a_record_with_several_examples_is_looked_at_once(reasoning):
    encoder = Encoder(reasoning, template=None, train_on="assistant")
    watch = seen(encoder, Conversation((*chat("Hi", "{{name}}").messages, *chat("Hi", "two").messages)))
    assert watch.examples == 2
    assert watch.placeholders["{{name}}"].count == 1


def test_a_label_out_of_the_vocabulary_is_refused_with_its_place(encoder):
    with pytest.raises(UserError, match=r"data.jsonl, line 2: the token id 1000 is out of .* vocabulary of 1000"):
        seen(encoder, Tokens((999,), (True,)), Tokens((5, 1000), (True, True)))


def test_a_data_set_without_targets_is_refused(encoder):
    with pytest.raises(UserError, match=r"mine: none of its 2 examples has a target .*data.jsonl, line 1"):
        check_dataset("mine", seen(encoder, chat("Hi", "two", 0.0), Tokens((1, 2), (False, False))))
    with pytest.raises(UserError, match="mine: no examples"):
        check_dataset("mine", Watch(encoder.end_ids, 1000))
    check_dataset("mine", seen(encoder, chat("Hi", "two", 0.0), chat("Hi", "two")))


def test_a_data_set_that_never_ends_a_turn_is_refused(encoder):
    watch = seen(encoder, chat("Hi", "two"))
    check_dataset("mine", watch)
    item, record = chat("Hi", "two"), Record({}, Origin("data.jsonl", 1))
    endless = Watch(encoder.end_ids, 1000)
    endless.see(record, item, Example(np.array([1, 2], np.int32), np.array([0, 1], np.float32), record.origin))
    with pytest.raises(UserError, match=r"mine: the end-of-turn token is a target in none of its 1 examples"):
        check_dataset("mine", endless)
    check_dataset("mine", seen(encoder, Tokens((1, 2), (True, True))))


def test_what_is_both_trained_on_and_held_out_is_reported(encoder):
    def hashes(*items):
        return np.array([example_hash(encoder.encode(i, Origin("x", 1))) for i in items], dtype=np.uint64)

    train = {"a": hashes(chat("Hi", "two"), chat("Hi", "four")), "b": hashes(chat("Bye", "two"))}
    assert overlap_warnings(train, {"new": hashes(chat("Hi", "Bye"))}) == []
    assert overlap_warnings(train, {}) == []
    (warning,) = overlap_warnings(train, {"held": hashes(chat("Hi", "two"), chat("x", "y"))})
    assert warning.startswith("1 of the 2 examples of held (held out) are also in a (training)")


@pytest.mark.parametrize(
    ("objective", "labels", "values", "said"),
    [
        ("kto", (), [[1, 1], [1]], "All training answers are wanted ones"),
        ("kto", (), [[0, 0]], "add wanted ones."),
        ("kto", (), [[1, 1], [0]], None),
        ("classify", ("a", "b", "c"), [[1, 1]], "the label b, so the model learns to give it to any text"),
        ("classify", ("a", "b", "c"), [[1], [0]], "No training record has the label c"),
        ("classify", ("a", "b"), [[1, 0]], None),
        ("reward", (), [[1.5, 1.5], [1.5]], "the score 1.5, so the model learns to give it to any answer"),
        ("reward", (), [[1, 0.5]], None),
        ("reward", (), [[1]], None),
        ("reward", (), [[]], None),
        ("sft", (), [[1, 1]], None),
    ],
)
def test_a_kind_that_no_record_has_is_told(objective, labels, values, said):
    found = missing_kinds(objective, labels, [np.array(one, dtype=np.float32) for one in values])
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
