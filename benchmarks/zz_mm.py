"""Scratch."""
import sys, time, os
import torch
from bench_gemv import *
t0=time.time()
def say(*a): print(*a, flush=True)
roof=read_roof(2.0); say("roof", roof/1e12)
for shape,plan,tunings in [("o",FOUR,[None,(8,3)]),("qkv",FOUR,[None,(8,3)]),("down",FOUR,[None,(8,3)]),("gateup",FOUR,[None,(8,2),(8,3)]),
  ("gateup",WIDTHS[0],[None]),("gateup",WIDTHS[1],[None]),("down",WIDTHS[1],[None]),("down",ORDERED,[None]),("head",FOUR,[None,(8,3)]),("gateup",MIXED[2],[None])]:
    m=Rotating(*SHAPES[shape],plan)
    xx=torch.randn(1,m.k,device="cuda",dtype=torch.float16); y=torch.empty(1,m.n,device="cuda",dtype=torch.float16)
    err=m.error(xx)
    for t in tunings:
        us=m.time(xx,y,True,t).p50; pl=m.time(xx,y,False,t).p50
        say(shape,plan.name,t,f"pdl {us:.2f} plain {pl:.2f} share {m.bytes/us*1e6/roof:.3f} err {err:.1e}", f"{time.time()-t0:.0f}s")
    if plan is FOUR:
        for r in (2,4,8,16,32,64):
            xx=torch.randn(r,m.k,device="cuda",dtype=torch.float16); y=torch.empty(r,m.n,device="cuda",dtype=torch.float16)
            say(shape,"m",r,f"{m.time(xx,y,True).p50:.2f}", f"err {m.error(xx):.1e}")
    del m
