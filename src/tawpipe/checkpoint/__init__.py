"""Checkpoints: write the state of a run while it trains, keep it on disk and in memory, and resume from it.

    Storage, optimizers ──stage──▶ copies in host memory ──a thread of every rank──▶ store ──▶ NAME
                                                                                               │
    Storage, optimizers ◀──load──────────────────── Source ◀──resume: newest, sound, of this history

* ``format``: files of a state: one-dimensional chunks under parameter names, and one manifest, which is written last.
* ``names``: names of the folder and the files of a state.
* ``store``: places for states: a disk that all machines share, or the memory of each machine and of the next one.
* ``save``: copy the state, write it in the background, give the folder its name.
* ``load``: one reader for both stores: check everything on all ranks, then fill the homes of each.
* ``resume``: choose the state to resume from.

Errors that must never happen:

* A half-written state is taken for a complete one. Therefore a folder gets its name only after every rank has synced
  its file and the manifest is written. The manifest has a checksum of every file and of itself.
* A run resumes a state of another history: one that was abandoned when the run went back to an earlier state, or one of
  another run in this folder.
* A load leaves a partial state without an error. A refusal (``UserError``) has changed nothing on any rank. If reading
  fails midway (``RunError``), nothing runs until a load succeeds.
* Code runs because a state is read. Weights are safetensors, everything else is JSON.
* A state holds numbers that are not finite, or that training changes while they are written.
* A rank waits for one that has failed. Errors of one rank are reported to all (``World.together``).
* A failed save destroys an earlier state.

Nothing depends on the number of ranks that saved, or on their order: chunks are named by parameter and first element.
Random numbers derive from (seed, step, micro-batch, block), so seed and step are the whole random state.
"""
