"""Audits of many targets, each in a process of its own, with limits of time and memory; resumable."""
