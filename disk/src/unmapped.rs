//! An image on its way to being served.

use ringway_image::{Layer, Use};

/// An image that is open, and of whose tables nothing is read.
#[derive(Debug)]
pub struct Unmapped {
    /// Its files, the top first.
    pub layers: Vec<Layer>,
    /// How it is to be served.
    pub usage: Use,
}
