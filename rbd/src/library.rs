//! librados and librbd, by their functions: rados/librados.h and rbd/librbd.h, whose ABI is kept
//! (`librados.so.2`, `librbd.so.1`).

use crate::error::RbdError;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};

/// `rados_t`, `rados_ioctx_t`, `rbd_image_t`, `rbd_completion_t`.
pub(crate) type Handle = *mut c_void;
/// `rbd_callback_t`.
pub(crate) type Callback = unsafe extern "C" fn(Handle, *mut c_void);

/// What `rbd_diff_iterate2` calls: offset, length, whether it is there, the caller's argument.
pub(crate) type Extent = unsafe extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

/// `rbd_image_watcher_t`.
#[repr(C)]
pub(crate) struct Watcher {
    pub(crate) addr: *mut c_char,
    pub(crate) id: i64,
    pub(crate) cookie: u64,
}

/// `rbd_config_option_t`.
#[repr(C)]
pub(crate) struct ConfigOption {
    pub(crate) name: *mut c_char,
    pub(crate) value: *mut c_char,
    pub(crate) source: c_int,
}

/// `rbd_image_info_t`.
#[repr(C)]
#[derive(Default)]
pub(crate) struct ImageInfo {
    pub(crate) bytes: u64,
    pub(crate) object_bytes: u64,
    pub(crate) objects: u64,
    pub(crate) order: c_int,
    pub(crate) prefix: [c_char; 24],
    pub(crate) parent_pool: i64,
    // `char parent_name[96]`: arrays of that length have no default.
    pub(crate) parent_name: [[c_char; 32]; 3],
}

/// `RBD_LOCK_MODE_EXCLUSIVE`.
pub(crate) const LOCK_EXCLUSIVE: c_int = 0;
/// `RBD_FEATURE_EXCLUSIVE_LOCK`.
pub(crate) const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;
/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`.
pub(crate) const THICK_PROVISION: c_int = 1;

macro_rules! library {
    ($($library:ident { $($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)* })*) => {
        /// The functions that are used.
        #[derive(Debug)]
        pub(crate) struct Library {
            $($(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*)*
        }

        impl Library {
            fn find($($library: Handle),*) -> Result<Self, RbdError> {
                Ok(Self {
                    $($($name: {
                        let found = symbol($library, concat!(stringify!($name), "\0"))
                            .ok_or(RbdError::Old(stringify!($name)))?;
                        // SAFETY: the function of this name has this type, by the headers.
                        unsafe { std::mem::transmute::<Handle, unsafe extern "C" fn($($argument),*) $(-> $result)?>(found) }
                    },)*)*
                })
            }
        }
    };
}

type Text = *const c_char;

library! {
    rados {
        rados_create: fn(*mut Handle, Text) -> c_int;
        rados_conf_read_file: fn(Handle, Text) -> c_int;
        rados_conf_set: fn(Handle, Text, Text) -> c_int;
        rados_conf_get: fn(Handle, Text, *mut c_char, usize) -> c_int;
        rados_connect: fn(Handle) -> c_int;
        rados_shutdown: fn(Handle);
        rados_ioctx_create: fn(Handle, Text, *mut Handle) -> c_int;
        rados_ioctx_destroy: fn(Handle);
        rados_ioctx_set_namespace: fn(Handle, Text);
    }
    rbd {
        rbd_open: fn(Handle, Text, *mut Handle, Text) -> c_int;
        rbd_open_read_only: fn(Handle, Text, *mut Handle, Text) -> c_int;
        rbd_close: fn(Handle) -> c_int;
        rbd_get_size: fn(Handle, *mut u64) -> c_int;
        rbd_get_features: fn(Handle, *mut u64) -> c_int;
        rbd_stat: fn(Handle, *mut ImageInfo, usize) -> c_int;
        rbd_config_image_list: fn(Handle, *mut ConfigOption, *mut c_int) -> c_int;
        rbd_config_image_list_cleanup: fn(*mut ConfigOption, c_int);
        rbd_diff_iterate2: fn(Handle, Text, u64, u64, u8, u8, Extent, *mut c_void) -> c_int;
        rbd_metadata_get: fn(Handle, Text, *mut c_char, *mut usize) -> c_int;
        rbd_metadata_set: fn(Handle, Text, Text) -> c_int;
        rbd_lock_acquire: fn(Handle, c_int) -> c_int;
        rbd_lock_break: fn(Handle, c_int, Text) -> c_int;
        rbd_lock_get_owners: fn(Handle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
        rbd_lock_get_owners_cleanup: fn(*mut *mut c_char, usize);
        rbd_list_lockers: fn(Handle, *mut c_int, *mut c_char, *mut usize, *mut c_char, *mut usize, *mut c_char, *mut usize, *mut c_char, *mut usize) -> isize;
        rbd_watchers_list: fn(Handle, *mut Watcher, *mut usize) -> c_int;
        rbd_watchers_list_cleanup: fn(*mut Watcher, usize);
        rbd_aio_create_completion: fn(*mut c_void, Callback, *mut Handle) -> c_int;
        rbd_aio_get_return_value: fn(Handle) -> isize;
        rbd_aio_release: fn(Handle);
        rbd_aio_readv: fn(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
        rbd_aio_writev: fn(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
        rbd_aio_discard: fn(Handle, u64, u64, Handle) -> c_int;
        rbd_aio_write_zeroes: fn(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
        rbd_aio_flush: fn(Handle, Handle) -> c_int;
    }
}

/// Loaded once, and never unloaded: it has threads.
static LOADED: Mutex<Option<&'static Library>> = Mutex::new(None);

impl Library {
    /// Loads it, unless that was done before.
    ///
    /// # Errors
    /// [`RbdError::NoLibrary`], [`RbdError::Old`].
    pub(crate) fn load() -> Result<&'static Self, RbdError> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = *loaded {
            return Ok(library);
        }
        let library = Self::find(open(c"librados.so.2")?, open(c"librbd.so.1")?)?;
        Ok(loaded.insert(Box::leak(Box::new(library))))
    }
}

fn open(name: &CStr) -> Result<Handle, RbdError> {
    // SAFETY: the constructors of the library run, as they would if this program were linked to it.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        // SAFETY: the text is this thread's until its next call of this kind.
        let why = unsafe { libc::dlerror() };
        // SAFETY: a text with its end, if there is one.
        let why = (!why.is_null()).then(|| unsafe { CStr::from_ptr(why) }.to_string_lossy());
        return Err(RbdError::NoLibrary(why.unwrap_or_default().into_owned()));
    }
    Ok(library)
}

fn symbol(library: Handle, name: &'static str) -> Option<Handle> {
    // SAFETY: the library is open, the name ends with a zero.
    let found = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
    (!found.is_null()).then_some(found)
}
