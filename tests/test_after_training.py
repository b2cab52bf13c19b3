"""The lines of docs/after-training.md, run on the folder that a run has written."""

import re
from pathlib import Path

import pytest
from helpers.drop_in import trainer_for
from helpers.tiny import save_tiny_model, tiny_dataset, tiny_tokenizer
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

PAGE = Path(__file__).parent.parent / "docs" / "after-training.md"
ROWS = "conversational_prompt_completion"


def lines_under(title: str) -> str:
    """Return the code below a title of the page."""
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


def answer(model, tokenizer) -> list[int]:
    asked = [{"role": "user", "content": "Two and two?"}]
    ids = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return model.eval().generate(**ids, max_new_tokens=8, do_sample=False)[0].tolist()


def test_a_merged_adapter_answers_as_the_trained_model_and_chats(tmp_path, monkeypatch, capsys):
    base = save_tiny_model(tmp_path, "llama")
    monkeypatch.chdir(tmp_path)
    adapter = {"peft_config": LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM")}
    settings = {
        "learning_rate": 0.1,
        "packing": True,
        "processing_class": tiny_tokenizer(chat=True),
    }
    model = AutoModelForCausalLM.from_pretrained(base)
    trainer = trainer_for("outputs/lora", ROWS, model=model, arguments=adapter, **settings)
    trainer.train()
    trainer.save_model()
    exec(lines_under("Merge an adapter"), {})
    tokenizer = AutoTokenizer.from_pretrained("outputs/merged")
    merged = AutoModelForCausalLM.from_pretrained("outputs/merged")
    trained = answer(trainer.model, trainer.processing_class)
    assert answer(merged, tokenizer) == trained
    untrained = AutoModelForCausalLM.from_pretrained(base)
    assert answer(untrained, tokenizer) != trained  # the control
    assert tokenizer.chat_template == trainer.processing_class.chat_template
    exec(lines_under("Chat with the result"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("eval_packing", [True, False])
def test_trl_logs_completions_of_a_packed_run(eval_packing, tmp_path):
    rows = tiny_dataset(ROWS)
    settings = {"packing": True, "eval_packing": eval_packing, "max_steps": 2}
    trainer = trainer_for(tmp_path, ROWS, arguments={"eval_dataset": rows}, **settings)
    code = lines_under("Read answers while it trains").replace("freq=50", "freq=1")
    scope = {"trainer": trainer}
    exec(code.replace("max_new_tokens=100", "max_new_tokens=2, pad_token_id=0"), scope)
    trainer.train()
    assert len(scope["callback"].table) == 2 * 5
    assert trainer.evaluate()["eval_loss"] > 0
