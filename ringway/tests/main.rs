//! The real program, run from outside. One test program, because each one is linked anew; what measures has a
//! program of its own beside it (`Cargo.toml`).

mod activation;
mod bad_input;
mod chained;
mod clones;
mod commit;
mod common;
mod copy;
mod copy_space;
mod ctl;
#[cfg(any(feature = "kill-points", debug_assertions))]
mod deadline;
mod demo;
mod doctor;
mod events;
mod fence;
mod first_mistakes;
mod flatten;
mod formats;
mod front_ends;
mod hangs;
mod held;
mod images;
mod io;
mod isolate;
mod journal;
mod kill;
mod limits;
mod log;
mod merge;
#[cfg(any(feature = "kill-points", debug_assertions))]
mod merge_points;
mod migration;
mod nbd;
mod nbd_tls;
mod owners;
mod page;
#[cfg(any(feature = "kill-points", debug_assertions))]
mod panics;
mod paths;
mod qcow2;
mod qemu_locks;
mod rbd;
mod reload;
mod remote;
mod remote_hosts;
mod remote_several;
mod remote_tls;
mod resize;
mod sandbox;
mod serve;
mod snapshots;
mod sockets;
mod state;
mod tools;
mod top;
mod trouble;
mod xen;
