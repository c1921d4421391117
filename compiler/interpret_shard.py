"""What the interpreter says of ops between ranks: one process alone has no sum of all ranks' parts."""

from __future__ import annotations

from typing import Any, NoReturn

from mlsdc.compiler import ops_shard
from mlsdc.compiler.errors import IrError
from mlsdc.compiler.interpret_core import Context, evaluates


@evaluates(ops_shard.AllReduce)
def all_reduce(op: ops_shard.AllReduce, inputs: tuple[Any, ...], context: Context) -> NoReturn:
    raise IrError(f"all_reduce sums what {op.ranks} processes have, the interpreter is one: execute the graph from before the pass 'shard'")
