"""Hugging Face Transformers: its Trainer with the optimizer given to `distribute`, models whose head is tied to the embedding, and what
`save_pretrained` writes.
"""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.nn")
pytest.importorskip("transformers", reason="Transformers is not installed: bash scripts/libraries.sh")

import numpy as np
import torch
import transformers
from beside_torch import N_ROWS, assert_equal_to_torch, ids, take_to, train
from torch import nn

import kvemb
from kvemb.torch import materialize


def gpt() -> nn.Module:
    torch.manual_seed(0)
    config = {"vocab_size": N_ROWS, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))


def bert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=N_ROWS, max_position_embeddings=16, **sizes))


def bart() -> nn.Module:
    torch.manual_seed(0)
    layers = {f"{side}_{what}": 1 for side in ("encoder", "decoder") for what in ("layers", "attention_heads", "ffn_dim")}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=N_ROWS, d_model=16, max_position_embeddings=16, scale_embedding=True, dropout=0.0, **layers)
    )


def gemma() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(vocab_size=N_ROWS, **sizes, **heads))


def loss_of(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    batch = ids(4, 8, generator=generator)
    return model(input_ids=batch, labels=batch).loss


@pytest.mark.parametrize("make", [gpt, bert])
def test_language_models_with_a_tied_head_train_with_torchs_losses(in_step: kvemb.Cluster, name: str, make: Any) -> None:
    model = make()
    done = assert_equal_to_torch(in_step, model, loss_of, name, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert "decoder.weight" in str(done) or "lm_head.weight" in str(done)


@pytest.mark.parametrize("make", [bart, gemma])
def test_embeddings_with_a_scale_learn_torchs_rows(in_step: kvemb.Cluster, name: str, make: Any) -> None:
    model = make()
    theirs = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = take_to(in_step, model, optimizer, name)
    losses = [train(one, loss_of, by) for one, by in ((model, optimizer), (theirs, torch.optim.SGD(theirs.parameters(), lr=0.1)))]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    (table,) = done.tables
    expected = theirs.get_input_embeddings().weight.detach().numpy()
    np.testing.assert_allclose(table.pull(np.arange(N_ROWS)), expected, rtol=1e-4, atol=1e-6)

    batch = ids(2, 8, generator=torch.Generator().manual_seed(1))
    scored = theirs.eval()(input_ids=batch).logits
    for copied in (materialize(model.eval()), copy.deepcopy(materialize(model))):
        torch.testing.assert_close(copied(input_ids=batch).logits, scored, rtol=1e-4, atol=1e-5)


def test_its_trainer_goes_as_in_torch(in_step: kvemb.Cluster, name: str, tmp_path: Path) -> None:
    data = [{"input_ids": row, "labels": row} for row in ids(64, 8, generator=torch.Generator().manual_seed(1))]

    def fit(cluster: kvemb.Cluster | None) -> list[float]:
        model = gpt()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if cluster is not None:
            take_to(cluster, model, optimizer, name)
        given = {"max_steps": 6, "per_device_train_batch_size": 8, "logging_steps": 1, "report_to": [], "save_strategy": "no"}
        arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, seed=0, **given)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    np.testing.assert_allclose(fit(in_step), fit(None), rtol=1e-4)


def test_save_pretrained_tells_that_it_writes_no_rows_and_a_copy_has_them(
    in_step: kvemb.Cluster, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = gpt()
    take_to(in_step, model, torch.optim.SGD(model.parameters(), lr=0.1), name)
    with caplog.at_level(logging.WARNING, logger="kvemb"):
        model.state_dict()
        plain = materialize(model.eval())
        plain.save_pretrained(tmp_path / "plain")
        assert not [line for line in caplog.messages if "from_pretrained" in line]
        for _ in range(2):  # as at every checkpoint of its Trainer
            model.save_pretrained(tmp_path / "without rows")
    (told,) = [line for line in caplog.messages if "from_pretrained would draw them at random" in line]
    assert "kvemb.torch.materialize(model)" in told

    loaded = type(model).from_pretrained(tmp_path / "plain")
    batch = ids(2, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(loaded(input_ids=batch).logits, model(input_ids=batch).logits)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
