//! The front-end at back-ends, in one test program, because each one is linked anew.
#![allow(missing_docs)]

mod connect;
mod paths;
mod qemu_storage_daemon;
