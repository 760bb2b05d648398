//! Clients at an export, in one test program, because each one is linked anew; what counts clients of the whole process
//! has a program of its own (`hazards.rs`).
#![allow(missing_docs)]

mod corpus;
mod gone;
mod requests;
