//! The engine against servers that do what a test has them do: honest ones, and others.

// Content is bytes of larger numbers.
#![allow(clippy::cast_possible_truncation)]
#![allow(missing_docs)]

mod allocation;
mod data;
mod hostile;
mod lost;
mod outage;
mod rig;
mod server;
mod several;
