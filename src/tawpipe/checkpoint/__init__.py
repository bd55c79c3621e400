"""Checkpoints: a run's state is written while it trains, kept on a disk and in memory, and gone on from.

    Storage, optimizers ──stage──▶ copies in host memory ──a thread of every rank──▶ store ──▶ NAME
                                                                                               │
    Storage, optimizers ◀──load──────────────────── Source ◀──resume: newest, sound, of this history

* ``format``: what a state is in files: one-dimensional chunks under parameter names, and one manifest, written last;
  ``names``: what its folder and its files are called.
* ``store``: where states are kept: on a disk that all machines share, or in the memory of each machine and the next.
* ``save``: stage, write in the background, give the folder its name.
* ``load``: one reader for both stores: everything is checked on all ranks, then each is given what its homes need.
* ``resume``: which state to go on from.

What must never happen:

* A half-written state taken for a whole one: a folder gets its name when every rank has synced its file and the
  manifest is there; the manifest has a checksum of every file and of itself.
* A state of another history gone on from: one that was gone back behind, or of another run in the same folder.
* A load that leaves half of a state without saying so: a refusal (``UserError``) has changed nothing on any rank, and
  where reading breaks off (``RunError``) nothing runs until a load succeeds.
* Code that runs because a state is read: weights are safetensors, everything else is JSON.
* Numbers that are not finite, or that training changes while they are written.
* A rank that waits for one that has failed: what goes wrong on one is told to all (``World.together``).
* A save that fails and takes an earlier state with it.

Nothing depends on how many ranks saved, or in which order: names are those of parameters, places are elements of them.
Random numbers derive from (seed, step, micro-batch, block), so seed and step are the whole random state.
"""
