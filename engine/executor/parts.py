"""Parts of steps that are a few lines: the balance of experts, adapters, layers with a window."""

from engine.core.plan import SlotOpen
from engine.executor.step_part import Batch, StepPart, StepRows
from engine.kv.step_batch import WindowedPageTable, WindowRows
from engine.lora.bank import AdapterBank
from engine.models.decoder import DenseDecoder


class BalancedExperts(StepPart):
    """Experts that may move between two steps: a recorded step runs without the host."""

    def expect(self, batch: Batch) -> None:
        assert batch.model.balance is not None, "a part of models whose experts move"
        batch.model.balance.on_step()


class AdapterPart(StepPart):
    """LoRA adapters, which change the model's layers."""

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank

    def attach(self, model: DenseDecoder) -> None:
        self._bank.attach(model.linear_sites())

    def open(self, opened: SlotOpen) -> None:
        self._bank.open(opened)

    def expect(self, batch: Batch) -> None:
        batch.adapted = self._bank.begin(batch.items)

    def begin(self, batch: Batch) -> None:
        self._bank.compute()


class WindowPart(StepPart):
    """Layers with a window, which have a pool of their own."""

    def __init__(self, page_table: WindowedPageTable) -> None:
        self._table = page_table.windows

    def fill(self, rows: StepRows) -> None:
        rows.step.windows = WindowRows(self._table.rows, self._table.locate(rows.token_slots, rows.places)[0])
