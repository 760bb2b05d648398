//! Front-end and back-end in one process: the whole stack without a virtual machine, every way of
//! asking on every kind of disk. What is on the disk is looked at from outside, too.

mod blocks;
mod config;
mod durability;
mod images;
mod latency;
mod layouts;
mod operations;
mod power_cut;
mod random;
mod scene;
mod transfers;
