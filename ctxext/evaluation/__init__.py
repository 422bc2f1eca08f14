"""Measure what a longer context is worth, against truncation (no longer context, only the last tokens).

| module | measures | begin with |
|---|---|---|
| ``perplexity`` | perplexity by position | ``make_plan``, then ``prepare`` |
| ``masked`` | the loss of masked tokens, by models that read to both sides | ``masked_readers``, then ``masked_jobs`` |
| ``passkey`` | whether the model repeats a number hidden in a long text | ``prepare``, then ``trials_of`` |
| ``ruler.run`` | RULER's tasks, offline | ``ruler_prompts``, asked by a ``measuring.survey.Survey`` |
| ``retrieval.choices`` | whether the right answer is likelier than wrong ones | ``make_prompts``, as for RULER |
| ``comparison`` | all methods side by side | ``prepare`` |

A prepared measurement is a ``measuring.survey.Survey``: call ``begin``, ``measure`` and ``result``.
"""
