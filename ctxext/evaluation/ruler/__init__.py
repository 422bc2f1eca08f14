"""RULER's tasks, offline, at any length from about a thousand tokens.

Prompts are made as NVIDIA's generator makes them, with these differences, which change no task: every prompt has a
separate seed; every prompt is as long as fits, where theirs are cut by whole steps; keys differ from each other (theirs
may coincide); a length that is too short is an error, where theirs runs on for ever; and where theirs downloads one
author's essays, ctxext takes any text, which the result names. Scores are therefore comparable between models measured
here, and to published ones only roughly.

Source: Hsieh et al., arXiv:2404.06654; github.com/NVIDIA/RULER@c3f5e3b.
"""
