"""Tests of the choice of an extension."""
