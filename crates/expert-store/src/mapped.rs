//! Files used where they are mapped, without slots.

use crate::error::StoreError;
use crate::key::FileSpec;
use crate::raw;
use memmap2::Mmap;
use std::fs::File;
use std::sync::Arc;

/// Read-only mappings of a list of files, for a machine that can hold them: the operating system
/// decides what stays in memory. Cloning shares the mappings.
///
/// A file that is cut while it is mapped cannot be noticed but by a signal: this is what the reads
/// of a [`crate::Store`] spare, and why mapped files are used only where the user asks for them or
/// where all fit.
#[derive(Clone, Debug)]
pub struct MappedFiles(Arc<[Option<Mmap>]>);

impl MappedFiles {
    /// Opens and maps the files.
    ///
    /// # Errors
    /// A file that cannot be opened or mapped, or has another length.
    pub fn open(files: &[FileSpec]) -> Result<Self, StoreError> {
        let map = |spec: &FileSpec| -> Result<Option<Mmap>, StoreError> {
            let path: Arc<std::path::Path> = Arc::from(spec.path.as_path());
            let open_error = |error: std::io::Error| StoreError::Open {
                path: Arc::clone(&path),
                errno: error.raw_os_error(),
            };
            let file = File::open(&spec.path).map_err(open_error)?;
            let found = file.metadata().map_err(open_error)?.len();
            if found != spec.len {
                return Err(StoreError::FileLength { path, wanted: spec.len, got: found });
            }
            (found > 0).then(|| raw::map_file(&file)).transpose().map_err(open_error)
        };
        Ok(Self(files.iter().map(map).collect::<Result<_, _>>()?))
    }

    /// All bytes of a file.
    pub fn bytes(&self, file: u32) -> &[u8] {
        self.0[file as usize].as_deref().unwrap_or(&[])
    }
}
