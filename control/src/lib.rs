//! The words by which a daemon is told what to do and asked what it does: its configuration, by options
//! or by a file, and the lines of its control socket. For programs that start daemons or talk to them.

pub mod config;
pub mod log;
pub mod protocol;
pub mod request;
pub mod size;
