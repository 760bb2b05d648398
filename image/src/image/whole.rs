//! Files of an image that are shorter than what they have to hold.

use crate::header::autoclear;
use crate::layers::Layers;
use std::io;

/// A data file is as long as the disk: what was never written is a hole.
pub(super) fn whole_data_file(layers: &mut Layers) -> io::Result<()> {
    let shape = layers.top().shape;
    if !layers.has_data_file() {
        return Ok(());
    }
    if shape.autoclear & autoclear::RAW_DATA != 0 && layers.has_backing() {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "its data file is to be a raw image of it (data_file_raw), but it is based on another one: \
             serve it read-only, or `qemu-img amend -o data_file_raw=off`",
        ));
    }
    let end = layers.data_end();
    if end < shape.size {
        layers.data().set_len(shape.size).map_err(|error| {
            let text = format!("its data file has {end} bytes, not {}: {error}", shape.size);
            io::Error::new(error.kind(), text)
        })?;
        layers.set_data_end(shape.size);
    }
    Ok(())
}

/// The last cluster of a file may lack its end, which reads as zeroes: now it is there. Bytes of the
/// file.
pub(super) fn whole_clusters(layers: &mut Layers, grows: bool) -> io::Result<u64> {
    let mut end = layers.top_end();
    let tables = layers.top();
    let whole = end.next_multiple_of(tables.shape.cluster());
    if grows && whole > end {
        tables.file.set_len(whole)?;
        end = whole;
        layers.set_top_end(end);
    }
    Ok(end)
}
