"""Reads a repository, tries its models in a copy, and writes tests, targets, the policy lock and a workflow."""
