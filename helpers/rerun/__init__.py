"""Run chapters again: the execution record, and the tools that use the chapters but know no model."""
