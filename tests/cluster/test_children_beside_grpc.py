"""A process that speaks gRPC starts children, and they become the program that was asked for.

gRPC's fork handlers ended 4 to 12 % of the children of a busy process on uvloop by SIGSEGV or SIGABRT.
"""

from __future__ import annotations

import subprocess
import sys

NUM_CHILDREN = 600

PROGRAM = """
import asyncio, collections, shutil
import cluster
import grpc.aio, uvloop

class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(answer)

async def answer(request, context):
    return request

async def call(channel):
    method = channel.unary_unary("/test.Echo/Say")
    while True:
        await method(b"hello")

async def main(num_children):
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ends = collections.Counter()
    # Of other options each, or they would share a connection.
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("test", number)]) for number in range(4)]
    callers = [asyncio.create_task(call(channel)) for channel in channels]
    for _ in range(num_children):
        child = await asyncio.create_subprocess_exec(shutil.which("true"))
        ends[await child.wait()] += 1
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    for channel in channels:
        await channel.close()
    await server.stop(None)
    print(dict(ends))

uvloop.run(main({num_children}))
"""


def test_children_of_a_process_that_speaks_grpc_start_whole() -> None:
    program = PROGRAM.replace("{num_children}", str(NUM_CHILDREN))
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, str({0: NUM_CHILDREN})), run.stderr
