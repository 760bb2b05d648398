//! What an image needs no more, for whoever opens it next.

use super::Writer;
use crate::map::Map;
use std::io;

impl Writer {
    /// Gives back what was taken ahead.
    ///
    /// # Errors
    /// What the host says; some of it leaks then.
    pub(crate) fn give_back_reserve(&mut self, map: &mut Map) -> io::Result<()> {
        let left = self.leave_journal(map);
        let unused: Vec<u64> = std::mem::take(&mut self.reserve).into();
        left.and(self.release(map, unused))
    }

    /// Gives back all that is not used, for whoever opens the image next.
    ///
    /// # Errors
    /// What the host says; some of it leaks then.
    pub(crate) fn close(&mut self, map: &mut Map) -> io::Result<()> {
        // The journal says which they are: without it a kill would lose them.
        let freed = std::mem::take(&mut self.freed);
        let released = self.release(map, freed);
        let left = self.leave_journal(map);
        let mut unused = std::mem::take(&mut self.freed);
        unused.extend(std::mem::take(&mut self.reserve));
        left.and(released).and(self.release(map, unused))
    }
}
