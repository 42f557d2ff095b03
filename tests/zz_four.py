import sys, tempfile, signal, time
from pathlib import Path
from tests.scattered.runs import under_way
def at(run, n):
    end=time.monotonic()+60
    while len(run.events("view"))<n-1: 
        assert time.monotonic()<end; time.sleep(0.05)
    return run.events("view")[n-2]
if __name__=="__main__":
    path=Path(tempfile.mkdtemp(dir="/tmp/sp"))
    for layout in sys.argv[1:]:
      for k in ("calm","rough","frozen"):
        t=time.time()
        with under_way("gpt", path/(k+layout), 4, layout=layout, steps=80 if k!="calm" else 80) as run:
            try:
                if k=="rough":
                    run.until(10); run.kill("3"); at(run,2); run.until(20); run.kill("0"); at(run,3); run.until(30); run.start(["3.2","0.2"])
                if k=="frozen":
                    run.until(10); run.kill("3",signal.SIGSTOP); at(run,2); run.until(20); run.kill("3",signal.SIGCONT)
                print(k, run.result()["weights_sha256"], run.losses[80], len(run.losses), round(time.time()-t,1))
                if k=="calm": calm=dict(run.losses)
                else: print("differ", max(abs(calm[s]-run.losses[s]) for s in calm if s in run.losses), sorted(calm.keys()-run.losses.keys()))
            except BaseException as e: print("FAILED", repr(e)[-3000:])
            print([ (e["number"],e["step"],e["members"]) for e in run.events("view")])
            if k!="calm":
                for n in run.workers: print("-----",n); print("\n".join(l[:300] for l in run.log(n).splitlines() if "copies" not in l)[-2500:])
