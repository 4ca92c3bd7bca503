"""Training drafters for one target model: the target writes its own conversations, the drafter learns its distribution.

    instructions ─> conversations (answers, their hidden states kept) ─> feature store ─> distillation ─> drafter file

`tandem drafter train` runs it (`drafter_training.commands`). Serving needs nothing from here.
"""
