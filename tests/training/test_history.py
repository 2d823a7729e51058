"""history.jsonl: rows that a crash may cut, and that nothing takes back."""

import torch
from tiny_models import Flat

from dolmen.files import kinds
from dolmen.files.write import Tail
from dolmen.training import balance
from dolmen.training.metrics import HistoryFile


def test_rows_stay_whole_after_one_that_was_cut_short(tmp_path):
    file = tmp_path / "history.jsonl"
    first = HistoryFile(file)
    first.add(1, {"saved": True})
    first.close()
    file.write_text(file.read_text() + '{"step": 2, "ti')
    tail = Tail(file, kinds.HISTORY_ROW)
    assert [row["step"] for row in tail.read()] == [1] and tail.refused == 0  # it may still come
    again = HistoryFile(file)
    again.add(2, {"begun": "resumed"})
    assert [row["step"] for row in tail.read()] == [2] and tail.refused == 1
    again.close()
    none = HistoryFile(None)
    none.add(3, {"saved": True})
    none.close()
    assert [row["step"] for row in Tail(file, kinds.HISTORY_ROW).read()] == [1, 2]


def test_a_tail_gives_each_row_once_and_begins_again_with_a_new_file(tmp_path):
    file = tmp_path / "rows.jsonl"
    tail = Tail(file, kinds.HISTORY_ROW)
    assert list(tail.read()) == []
    file.write_text('{"step": 1, "time": 0}\n\n{"step": 2, "time": 0}\n{"step": "x"}\n')
    assert [row["step"] for row in tail.read()] == [1, 2] and tail.refused == 1
    assert list(tail.read()) == [] and not tail.first
    other = tmp_path / "other"
    other.write_text('{"step": 7, "time": 0}\n')
    other.rename(file)
    assert [(row["step"], tail.first) for row in tail.read()] == [(7, True)] and tail.refused == 0
    file.write_text("")
    assert list(tail.read()) == [] and tail.first


def test_loads_are_over_the_mean_of_their_layer():
    spec = Flat(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        dense_layers=(0,),
        moe_intermediate_size=16,
    ).spec
    tallies = torch.zeros(3, 6, dtype=torch.float64)
    tallies[1] = torch.tensor([4.0, 4, 4, 4, 9, 9])
    tallies[2] = torch.tensor([8.0, 0, 4, 4, 9, 9])
    assert balance.expert_loads(spec, tallies) == {"1": [1, 1, 1, 1], "2": [2, 0, 1, 1]}
