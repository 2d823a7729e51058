"""What a new user meets in the first hour: words that say what to do, and no silence."""

import pytest
import tinyrun
from tinyrun import dolmen

import dolmen as package

material, one_thread = tinyrun.material, tinyrun.one_thread


@pytest.mark.parametrize("word, value", [("top_k", 5), ("top_p", 0.9)])
def test_what_draws_is_refused_where_nothing_is_drawn(material, word, value):
    option = f"--{word.replace('_', '-')}"
    said = f"{option} draws, and without --temperature nothing is drawn: add --temperature 1"
    result = dolmen("generate", material.model, "--prompt", "a", option, value)
    assert (result.code, result.err) == (2, f"dolmen generate: {said}\n")
    with pytest.raises(ValueError, match=said):
        package.generate(material.model, "a", **{word: value})


def test_several_prompts_give_several_texts(material):
    model, prompts = package.load(material.model), ["ab", "abc abc", "ab"]
    texts = model.generate(prompts, max_new_tokens=4)
    assert texts == [model.generate(prompt, max_new_tokens=4) for prompt in prompts]
    assert package.generate(material.model, ("ab",), max_new_tokens=4) == texts[:1]
    for wrong in (3, [3], ["a", None]):
        with pytest.raises(ValueError, match="^the prompt is (3|None): it must be a text$"):
            model.generate(wrong)
