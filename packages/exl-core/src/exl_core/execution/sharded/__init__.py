"""Matrices sharded over several devices.

| module | contents |
|---|---|
| `shares`, `context` | the devices and the share of each |
| `cutting` | which device has what, before loading |
| `matrix`, `sums` | matrices cut by outputs, and by quarters of K |
| `heads` | attention whose heads are on several devices |
| `feed_forward` | MLPs whose features, and mixtures whose experts are on several devices |
| `exchange`, `processes` | results on their way to the home device: within a process, between processes |
| `executor` | runs the modules |
| `launches`, `exchange_buffers` | the launches of each device in a captured step, and their exchanges |
| `coverage` | which models have these launches |
| `prompts` | passes of many rows by operators on the same shares |
"""
