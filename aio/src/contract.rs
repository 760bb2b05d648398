//! What every engine must do, as one suite that each of them passes.
//!
//! ```no_run
//! # use ringway_aio::{Engine, Null, contract::{Mode, Suite}};
//! Suite {
//!     make: &|depth| Box::new(Null::new(depth).unwrap()),
//!     dir: std::path::Path::new("/var/tmp"),
//!     modes: &[Mode::Cached, Mode::Direct],
//!     moves_data: false,
//!     syscalls_per_io_max: 0.1,
//!     block_device: None,
//! }
//! .run();
//! ```

mod bells;
mod data;
mod ports;
mod rig;
mod setting;
mod turns;

use bells::{
    bell_amid_operations, bell_before_wait, bell_during_wait, many_bells, no_byte_without_a_ring,
    sockets_and_pipes, wait_ends_in_time, watch_and_unwatch,
};
use data::{
    discard, errors, random_mix, reads_and_writes, short_at_the_end, sync, vectors, zeroes,
};
use ports::{commands, registered_buffers};
use turns::{
    dropped_in_flight, each_tag_once, few_system_calls, files_come_and_go, full_then_not,
    submit_with_the_wait,
};

pub use setting::{Mode, Suite, takes_direct};

type Case = (&'static str, fn(&Suite<'_>, Mode));

impl Suite<'_> {
    const DATA: [Case; 10] = [
        ("reads and writes", reads_and_writes),
        ("vectors of 1 to 1024 segments", vectors),
        ("sync", sync),
        ("punch hole, zero range", zeroes),
        ("short at the end of the file", short_at_the_end),
        ("errors are results", errors),
        ("random mix", random_mix),
        ("files come and go", files_come_and_go),
        ("registered buffers", registered_buffers),
        ("dropped in flight", dropped_in_flight),
    ];

    const ANY: [Case; 13] = [
        ("full, then not", full_then_not),
        ("each tag once", each_tag_once),
        ("few system calls", few_system_calls),
        ("submit with the wait", submit_with_the_wait),
        ("a bell before the wait", bell_before_wait),
        ("a bell during the wait", bell_during_wait),
        ("a bell with operations in flight", bell_amid_operations),
        ("many bells, many rings", many_bells),
        ("watch and unwatch", watch_and_unwatch),
        ("sockets and pipes", sockets_and_pipes),
        ("no byte without a ring", no_byte_without_a_ring),
        ("commands", commands),
        ("a wait ends in time", wait_ends_in_time),
    ];

    /// Runs it all; panics at the first rule that is broken, after the name of the case.
    pub fn run(&self) {
        let cases = Self::ANY.iter().chain(Self::DATA.iter().filter(|_| self.moves_data));
        for (name, case) in cases {
            for &mode in self.modes {
                println!("contract: {name}, {mode:?}");
                case(self, mode);
            }
        }
        if let Some(device) = self.block_device {
            println!("contract: discard");
            discard(self, device);
        }
    }
}
